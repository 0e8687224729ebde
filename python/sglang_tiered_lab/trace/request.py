"""The one record every trace becomes, whatever file it was read from."""

from __future__ import annotations

import msgspec

MAX_BLOCK_ID = (1 << 64) - 1
MAX_LENGTH = 1 << 31
"""Of a prompt or an answer, in tokens; no trace comes near, and sums stay far from overflow."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request of a trace.

    ``arrival_s`` counts from the trace's own zero; ``None`` in a format without times (ShareGPT).
    Lengths are in tokens. ``block_ids`` names the prompt's blocks of ``block_tokens`` tokens, the
    last one filled in part: ``num_blocks_for(input_length, block_tokens)`` of them, each from 0 to
    ``MAX_BLOCK_ID``. An id names the whole prefix up to its block's end, so two requests share as
    many leading blocks as their lists do.

    ``turn`` counts from 1 within ``conversation``; both, and ``tenant``, only where known.
    ``delay_s`` is the time since the end of the answer before it in its conversation, where the
    trace says that; ``arrival_s`` then counts that answer as given at once.
    """

    arrival_s: float | None
    input_length: int
    output_length: int
    block_ids: tuple[int, ...]
    block_tokens: int
    conversation: str | None = None
    turn: int | None = None
    tenant: str | None = None
    delay_s: float | None = None

    @property
    def context_length(self) -> int:
        """Tokens in the KV cache once the request is answered."""
        return self.input_length + self.output_length


def num_blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold so many tokens, the last one filled in part."""
    return -(-num_tokens // block_tokens)
