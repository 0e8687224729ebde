"""The Mooncake trace format: one JSON object a line, one line a request.

Published with Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving"
(FAST 2025). ``hash_ids`` names the prompt's blocks of 512 tokens, the last one filled in part;
equal ids are equal prefixes, so two requests share as many leading blocks as their lists do.

What we write has keys of our own where there is something to say, which other readers skip:
``block_size`` when it is not 512, ``session_id``, ``turn`` and ``tenant``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from sglang_tiered.errors import TraceError
from sglang_tiered.trace.request import MAX_BLOCK_ID, TraceRequest, num_blocks_for
from sglang_tiered.trace.rows import line_rows
from sglang_tiered.trace.source import open_trace
from sglang_tiered.trace.tally import BadRowError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["BLOCK_TOKENS", "MAX_LENGTH", "Request", "decode", "encode", "read"]

BLOCK_TOKENS = 512
MAX_LENGTH = 1 << 31
"""Of a prompt or an answer, in tokens; no trace comes near, and sums stay far from overflow."""

_Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH)]
_Id = Annotated[int, msgspec.Meta(ge=0)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line. ``timestamp`` is milliseconds since the trace began."""

    timestamp: _Milliseconds
    input_length: _Length  # tokens
    output_length: _Length  # tokens
    hash_ids: tuple[_Id, ...]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)] = BLOCK_TOKENS
    session_id: str | int | None = None
    turn: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tenant: str | None = None

    def __post_init__(self) -> None:
        num_blocks = num_blocks_for(self.input_length, self.block_size)
        if len(self.hash_ids) != num_blocks:
            raise ValueError(
                f"{self.input_length} tokens are {num_blocks} blocks, not {len(self.hash_ids)}"
            )
        if self.hash_ids and max(self.hash_ids) > MAX_BLOCK_ID:
            raise ValueError(f"block id {max(self.hash_ids)} takes more than 64 bits")


_decoder = msgspec.json.Decoder(Request)
_encoder = msgspec.json.Encoder()


def decode(data: bytes) -> TraceRequest:
    """The request of one line. Raises ``BadRowError``."""
    request = _decode(data)
    session = request.session_id
    return TraceRequest(
        arrival_s=request.timestamp / 1000,
        input_length=request.input_length,
        output_length=request.output_length,
        block_ids=request.hash_ids,
        block_tokens=request.block_size,
        conversation=None if session is None else str(session),
        turn=request.turn,
        tenant=request.tenant,
    )


def _decode(data: bytes) -> Request:
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # also what __post_init__ raised
        raise BadRowError(str(error)) from error
    except RecursionError as error:
        raise BadRowError("it is nested too deeply") from error


def encode(request: TraceRequest) -> bytes:
    """One line, with its newline. ``arrival_s`` must not be ``None``; it is rounded to
    milliseconds."""
    if request.arrival_s is None:
        raise ValueError("a Mooncake request has a time")
    line = Request(
        timestamp=round(request.arrival_s * 1000),
        input_length=request.input_length,
        output_length=request.output_length,
        hash_ids=request.block_ids,
        block_size=request.block_tokens,
        session_id=request.conversation,
        turn=request.turn,
        tenant=request.tenant,
    )
    return _encoder.encode(line) + b"\n"


def read(path: Path) -> Iterator[Request]:
    """The lines of a trace in order; blank lines are skipped. Raises ``TraceError`` at the first
    bad one. Most callers want ``trace.reader.read_trace``."""
    file, _ = open_trace(path)
    with file:
        for row in line_rows(file):
            try:
                if row.problem:
                    raise BadRowError(row.problem)
                yield _decode(row.data)
            except BadRowError as error:
                raise TraceError(
                    f"line {row.line} of {path} is not a Mooncake request ({error}); repair or "
                    "remove it."
                ) from error
