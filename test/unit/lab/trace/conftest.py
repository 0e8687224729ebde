"""The published traces, where they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
# Read before a fixture clears SGLANG_* for the tests.
DATA = Path(os.environ.get("SGLANG_TIERED_DATA") or ROOT.parent / "shared" / "data")


@pytest.fixture
def published() -> Callable[[str], Path]:
    """``published("conversation")``: the Mooncake trace of that name, or a skipped test."""

    def path(name: str) -> Path:
        file = DATA / "mooncake" / f"{name}.jsonl"
        if not file.is_file():
            pytest.skip(f"no mooncake/{name}.jsonl: set SGLANG_TIERED_DATA to a folder of traces")
        return file

    return path
