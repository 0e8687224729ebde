"""The Mooncake trace format: one JSON object a line, one line a request.

Published with Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving"
(FAST 2025). ``hash_ids`` names the prompt's blocks of 512 tokens, the last one filled in part;
equal ids are equal prefixes, so two requests share as many leading blocks as their lists do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from sglang_tiered.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["BLOCK_TOKENS", "Request", "read"]

BLOCK_TOKENS = 512

_Count = Annotated[int, msgspec.Meta(ge=0)]


class Request(msgspec.Struct, frozen=True):
    """One request. ``timestamp`` is milliseconds since the trace began."""

    timestamp: _Count
    input_length: _Count  # tokens
    output_length: _Count  # tokens
    hash_ids: tuple[_Count, ...]

    def __post_init__(self) -> None:
        num_blocks = -(-self.input_length // BLOCK_TOKENS)
        if len(self.hash_ids) != num_blocks:
            raise ValueError(
                f"{self.input_length} tokens are {num_blocks} blocks, not {len(self.hash_ids)}"
            )


def read(path: Path) -> Iterator[Request]:
    """The requests of a trace in order; blank lines are skipped. Raises ``TraceError``."""
    decoder = msgspec.json.Decoder(Request)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:  # also what ``__post_init__`` raised
                raise TraceError(
                    f"line {number} of {path} is not a Mooncake request ({error}); repair or "
                    "remove it."
                ) from error
