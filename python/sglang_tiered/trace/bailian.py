"""The Qwen-Bailian trace format: one JSON object a line, one line a request.

Published with Wang et al., "KVCache Cache in the Wild" (USENIX ATC 2025) as
alibaba-edu/qwen-bailian-usagetraces-anon, whose README is the source of this page: ``timestamp`` in
seconds, ``parent_chat_id`` -1 for the first turn, blocks of 16 tokens. Each block is hashed by
itself as far as that README says, so an id names a block's content and not its prefix.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from sglang_tiered.trace.mooncake import MAX_LENGTH
from sglang_tiered.trace.request import MAX_BLOCK_ID, TraceRequest, num_blocks_for
from sglang_tiered.trace.tally import BadRowError

__all__ = ["BLOCK_TOKENS", "Decoder"]

BLOCK_TOKENS = 16

_Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH)]
_Id = Annotated[int, msgspec.Meta(ge=0)]

# Ids above it are ours: for a last block, filled in part, that the file gives no id.
_OWN_IDS = 1 << 63


class _Line(msgspec.Struct, frozen=True):
    chat_id: int
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e12)]  # seconds
    input_length: _Length  # tokens
    output_length: _Length  # tokens
    hash_ids: tuple[_Id, ...]
    parent_chat_id: int = -1
    turn: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        num_blocks = num_blocks_for(self.input_length, BLOCK_TOKENS)
        if len(self.hash_ids) not in (num_blocks, self.input_length // BLOCK_TOKENS):
            raise ValueError(
                f"{self.input_length} tokens are {num_blocks} blocks, not {len(self.hash_ids)}"
            )
        if self.hash_ids and max(self.hash_ids) > MAX_BLOCK_ID:
            raise ValueError(f"block id {max(self.hash_ids)} takes more than 64 bits")


class Decoder:
    """Of one file. Remembers the conversation of every request (a dict entry each), as a line names
    only the one before it."""

    def __init__(self) -> None:
        self._lines = msgspec.json.Decoder(_Line)
        self._roots: dict[int, int] = {}
        self._num_requests = 0

    def decode(self, data: bytes) -> TraceRequest:
        """The request of one line. Raises ``BadRowError``."""
        try:
            line = self._lines.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # also __post_init__'s
            raise BadRowError(str(error)) from error
        except RecursionError as error:
            raise BadRowError("it is nested too deeply") from error
        self._num_requests += 1
        ids = line.hash_ids
        if len(ids) < num_blocks_for(line.input_length, BLOCK_TOKENS):
            ids = (*ids, _OWN_IDS + self._num_requests)  # nobody shares it
        # A parent before the trace began is a root of its own.
        root = line.chat_id
        if line.parent_chat_id >= 0:
            root = self._roots.get(line.parent_chat_id, line.parent_chat_id)
        self._roots[line.chat_id] = root
        return TraceRequest(
            arrival_s=line.timestamp,
            input_length=line.input_length,
            output_length=line.output_length,
            block_ids=ids,
            block_tokens=BLOCK_TOKENS,
            conversation=str(root),
            turn=line.turn,
        )
