"""Traces of a few conversations in Mooncake's format, as lines."""

from __future__ import annotations

import json

__all__ = ["talk_lines"]


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
