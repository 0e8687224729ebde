"""Traces for the tests: small ones made by hand, and the published ones where they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_tiered_lab.trace.request import TraceRequest, num_blocks_for

ROOT = Path(__file__).resolve().parents[4]
# Read before a fixture clears SGLANG_* for the tests.
DATA = Path(os.environ.get("SGLANG_TIERED_DATA") or ROOT.parent / "shared" / "data")

MakeRequest = Callable[..., TraceRequest]


@pytest.fixture
def published() -> Callable[[str], Path]:
    """``published("conversation")``: the Mooncake trace of that name, or a skipped test."""

    def path(name: str) -> Path:
        file = DATA / "mooncake" / f"{name}.jsonl"
        if not file.is_file():
            pytest.skip(f"no mooncake/{name}.jsonl: set SGLANG_TIERED_DATA to a folder of traces")
        return file

    return path


@pytest.fixture
def make_request() -> MakeRequest:
    """``make_request(ids)``: a request with those blocks, full but for ``missing`` tokens."""

    def make(
        ids: tuple[int, ...],
        *,
        block_tokens: int = 16,
        missing: int = 0,
        output_length: int = 5,
        arrival_s: float | None = 0.0,
        **others: object,
    ) -> TraceRequest:
        input_length = len(ids) * block_tokens - missing
        assert num_blocks_for(input_length, block_tokens) == len(ids)
        return TraceRequest(
            arrival_s=arrival_s,
            input_length=input_length,
            output_length=output_length,
            block_ids=ids,
            block_tokens=block_tokens,
            **others,  # type: ignore[arg-type]
        )

    return make
