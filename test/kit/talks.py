"""Traces of a few conversations in Mooncake's format, as lines."""

from __future__ import annotations

import json

from sglang_tiered_lab.trace.request import TraceRequest, num_blocks_for


def talk_lines(every_ms: int, num_output: int) -> str:
    """Eight conversations of eight turns that share their first block, a request so often."""
    return "".join(
        json.dumps(
            {
                "timestamp": every_ms * i,
                "input_length": 1536 + 512 * (i // 8),
                "output_length": num_output,
                "hash_ids": [0, *range(1000 * (i % 8) + 1, 1000 * (i % 8) + 3 + i // 8)],
            }
        )
        + "\n"
        for i in range(64)
    )


def make_request(
    ids: tuple[int, ...],
    *,
    block_tokens: int = 16,
    missing: int = 0,
    output_length: int = 5,
    arrival_s: float | None = 0.0,
) -> TraceRequest:
    """A request with those blocks, full but for ``missing`` tokens."""
    input_length = len(ids) * block_tokens - missing
    assert num_blocks_for(input_length, block_tokens) == len(ids)
    return TraceRequest(
        arrival_s=arrival_s,
        input_length=input_length,
        output_length=output_length,
        block_ids=ids,
        block_tokens=block_tokens,
    )
