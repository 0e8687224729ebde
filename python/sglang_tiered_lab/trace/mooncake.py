"""Traces whose prompts are named block by block: one JSON object a request, with ``hash_ids``.

*Mooncake* (Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving",
FAST 2025): ``hash_ids`` names the prompt's blocks of 512 tokens, the last one filled in part; equal
ids are equal prefixes. Times are milliseconds. As others write it, there are also: blocks of any
size, ids that are strings or negative, ids of whole blocks only, lengths such as ``600.0``, and
sessions (``session_id``) whose later turns say how long after an answer they come (``delay``).

*Qwen-Bailian* (Wang et al., "KVCache Cache in the Wild", ATC 2025): blocks of 16 tokens whose ids
name their content, whatever lies before; seconds; ``parent_chat_id`` names the turn before.

What we write is Mooncake's, with keys of our own where there is something to say: ``block_size``
when it is not 512, ``conversation``, ``turn``, ``tenant`` and ``delay``. Not ``session_id``: some
readers append the rows of one session to each other, and ours hold whole prompts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
import xxhash

from sglang_tiered_lab.trace.block_size import infer_block_tokens
from sglang_tiered_lab.trace.clock import Clock
from sglang_tiered_lab.trace.forms import Format
from sglang_tiered_lab.trace.request import MAX_BLOCK_ID, MAX_LENGTH, TraceRequest, num_blocks_for
from sglang_tiered_lab.trace.tally import BadRowError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_tiered_lab.trace.rows import Row


BLOCK_TOKENS = 512
_USUAL = {Format.MOONCAKE: BLOCK_TOKENS, Format.BAILIAN: 16}
_PER_S = {Format.MOONCAKE: 1000, Format.BAILIAN: 1}

_LENGTH = msgspec.Meta(ge=0, le=MAX_LENGTH)
_Length: TypeAlias = Annotated[int, _LENGTH] | Annotated[float, _LENGTH]
_TIME = msgspec.Meta(ge=-(10**15), le=10**15)
_Time: TypeAlias = Annotated[int, _TIME] | Annotated[float, _TIME]
_Name: TypeAlias = str | int


class _Line(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    timestamp: _Time | None = None
    input_length: _Length  # tokens
    output_length: _Length  # tokens
    hash_ids: tuple[_Name, ...]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)] | None = None
    conversation: _Name | None = None
    session_id: _Name | None = None
    chat_id: _Name | None = None
    parent_chat_id: _Name | None = None
    turn: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tenant: str | None = None
    delay: _Time | None = None


_decoder = msgspec.json.Decoder(_Line)
_encoder = msgspec.json.Encoder()
_PLACE = re.compile(r" \(byte \d+\)")


class BlockReader:
    """Reads the rows of one file, in their order. Remembers a time for each session and, of
    Qwen-Bailian, the conversation of each request.

    ``block_tokens`` is the size of blocks where a row does not say; without it, it is inferred from
    ``first``, some rows of the file, and ``note`` says so where it is not the usual one.
    """

    def __init__(
        self,
        known: Format = Format.MOONCAKE,
        *,
        has_times: bool = True,
        block_tokens: int | None = None,
        first: Iterable[Row] = (),
    ) -> None:
        self._clock = Clock(has_times=has_times)
        self._per_s = _PER_S[known]
        self._names_contents = known is Format.BAILIAN
        self._conversations: dict[_Name, _Name] = {}  # of a chat: the first of its chain
        self.note: str | None = None
        if block_tokens is None:
            usual = _USUAL[known]
            block_tokens = infer_block_tokens(_lengths(first), usual)
            if block_tokens != usual:
                self.note = (
                    f"its blocks are taken to have {block_tokens} tokens, which its lengths fit "
                    "best; --trace-block-tokens says otherwise."
                )
        self._block_tokens = block_tokens

    def decode(self, row: Row) -> TraceRequest:
        """The request of a row. Raises ``BadRowError``."""
        line = _decode(row.data)
        size = line.block_size or self._block_tokens
        length = _whole("input_length", line.input_length)
        conversation = self._conversation(line)
        delay_s = None if line.delay is None else line.delay / self._per_s
        time_s = None if line.timestamp is None else line.timestamp / self._per_s
        return TraceRequest(
            output_length=_whole("output_length", line.output_length),
            block_ids=self._ids(line.hash_ids, length, size, row.number),
            arrival_s=self._clock.arrival_s(conversation, time_s, delay_s),
            input_length=length,
            block_tokens=size,
            conversation=conversation,
            turn=line.turn,
            tenant=line.tenant,
            delay_s=delay_s,
        )

    def _conversation(self, line: _Line) -> str | None:
        name = line.session_id if line.conversation is None else line.conversation
        if name is None and line.chat_id is not None:
            parent = line.parent_chat_id
            if parent is None or parent == -1:
                parent = line.chat_id
            name = self._conversations.get(parent, parent)
            self._conversations[line.chat_id] = name
        return None if name is None else str(name)

    def _ids(
        self, names: tuple[_Name, ...], length: int, size: int, number: int
    ) -> tuple[int, ...]:
        ids = tuple(map(_id, names))
        if self._names_contents:
            ids = _chained(ids)
        num_blocks = num_blocks_for(length, size)
        if len(ids) == num_blocks - 1 and len(ids) == length // size:
            # Nobody says what the rest of the prompt is, so it is like no other.
            ids = (*ids, _digest(f"rest of {number}"))
        if len(ids) != num_blocks:
            raise BadRowError(
                f"its hash_ids are not those of its input_length in blocks of {size} tokens",
                f"{length} tokens are {num_blocks} blocks, not {len(ids)}",
            )
        return ids


def _lengths(rows: Iterable[Row]) -> list[tuple[int, int]]:
    found = []
    for row in rows:
        try:
            line = _decode(row.data)
        except BadRowError:
            continue
        if line.block_size is None:
            found.append((int(line.input_length), len(line.hash_ids)))
    return found


def _decode(data: bytes) -> _Line:
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = _PLACE.sub("", str(error)).replace("JSON is malformed", "it is not JSON")
        raise BadRowError(reason) from error
    except RecursionError as error:
        raise BadRowError("it is nested too deeply") from error


def _whole(key: str, value: float) -> int:
    if value != int(value):
        raise BadRowError(f"its {key} is not a whole number", f"{value}")
    return int(value)


def _id(name: _Name) -> int:
    """A number from 0 to ``MAX_BLOCK_ID`` stays; any other name becomes a digest of it."""
    if isinstance(name, int) and 0 <= name <= MAX_BLOCK_ID:
        return name
    return _digest(str(name))


def _digest(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))


def _chained(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids of prefixes, from ids of contents."""
    found, before = [], b""
    for block in ids:
        before = xxhash.xxh3_128_digest(before + block.to_bytes(8, "little"))
        found.append(int.from_bytes(before[:8], "little"))
    return tuple(found)


def encode(request: TraceRequest) -> bytes:
    """One line, with its newline. ``arrival_s`` must not be ``None``; it is rounded to
    milliseconds."""
    if request.arrival_s is None:
        raise ValueError("a Mooncake request has a time")
    line = _Line(
        timestamp=round(request.arrival_s * 1000),
        input_length=request.input_length,
        output_length=request.output_length,
        hash_ids=request.block_ids,
        block_size=None if request.block_tokens == BLOCK_TOKENS else request.block_tokens,
        conversation=request.conversation,
        turn=request.turn,
        tenant=request.tenant,
        delay=None if request.delay_s is None else round(request.delay_s * 1000),
    )
    return _encoder.encode(line) + b"\n"
