"""Reads a trace of any format as a stream of ``TraceRequest``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from sglang_tiered.errors import TraceError
from sglang_tiered.trace import mooncake, sharegpt
from sglang_tiered.trace.rows import array_rows, line_rows
from sglang_tiered.trace.source import Format, detect, find, open_trace
from sglang_tiered.trace.tally import BadRowError, Tally
from sglang_tiered.trace.text import Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import BinaryIO

    from sglang_tiered.trace.request import TraceRequest
    from sglang_tiered.trace.rows import Row

__all__ = ["read_trace"]

# The requests of a row, and what of it was left out.
_Decode: TypeAlias = "Callable[[Row], tuple[list[TraceRequest], str | None]]"


def read_trace(
    path: Path | None = None,
    *,
    format: Format | None = None,
    tally: Tally | None = None,
    tokens: Tokens | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Iterator[TraceRequest]:
    """The requests of a trace file, in the order of the file.

    ``path`` is looked up as ``source.find`` says. ``format`` is told from the content unless given.
    Without ``tally``, the first bad row raises ``TraceError``; with one, bad rows are counted in it
    unless it is strict. ``tokens`` says how text becomes tokens, for ShareGPT. ``on_bytes`` is told
    after every row how far in the file the reader is.

    Memory: one row and a buffer. What concerns the whole file raises ``TraceError`` before the
    first request.
    """
    tally = Tally(strict=True) if tally is None else tally
    found = find(path)
    file, head = open_trace(found)
    try:
        known = detect(head, found) if format is None else format
    except BaseException:
        file.close()
        raise
    is_array = head.lstrip().startswith(b"[")
    source = _Source(found, file, is_array, known.title, on_bytes)
    return _requests(source, _decoder(known, tokens), tally)


class _Source(NamedTuple):
    path: Path
    file: BinaryIO
    is_array: bool
    title: str
    on_bytes: Callable[[int], None] | None

    def name(self, row: Row) -> str:
        if self.is_array:
            return f"row {row.number} (line {row.line}) of {self.path}"
        return f"line {row.line} of {self.path}"


def _requests(source: _Source, decode: _Decode, tally: Tally) -> Iterator[TraceRequest]:
    with source.file as file:
        rows = array_rows(file) if source.is_array else line_rows(file)
        while (row := _next(rows, source.path)) is not None:
            tally.num_rows += 1
            try:
                if row.problem:
                    raise BadRowError(row.problem)
                requests, problem = decode(row)
            except BadRowError as error:
                tally.skip(f"{source.name(row)} is not a {source.title} request ({error})")
                requests, problem = [], None
            if problem:
                tally.repair(f"{source.name(row)} is used in part ({problem})")
            tally.num_requests += len(requests)
            yield from requests
            if source.on_bytes is not None:
                source.on_bytes(file.tell())


def _next(rows: Iterator[Row], path: Path) -> Row | None:
    try:
        return next(rows, None)
    except OSError as error:
        raise TraceError(f"{path} cannot be read on ({error.strerror}); check its disk.") from error


def _decoder(known: Format, tokens: Tokens | None) -> _Decode:
    if known is Format.MOONCAKE:
        return lambda row: ([mooncake.decode(row.data)], None)
    text = tokens or Tokens(mooncake.BLOCK_TOKENS)
    return lambda row: sharegpt.decode(row.data, row.number, text)
