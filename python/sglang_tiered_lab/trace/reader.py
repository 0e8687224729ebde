"""Reads a trace of any form as a stream of ``TraceRequest``."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from sglang_tiered.errors import TraceError
from sglang_tiered_lab.trace.azure import TableReader
from sglang_tiered_lab.trace.forms import KNOWN, Form, Format, Layout, detect, form_of
from sglang_tiered_lab.trace.mooncake import BLOCK_TOKENS, BlockReader
from sglang_tiered_lab.trace.rows import json_rows, line_rows, parquet_names, parquet_rows
from sglang_tiered_lab.trace.sharegpt import ConversationReader
from sglang_tiered_lab.trace.source import PARQUET, Opened, find, open_trace, reading
from sglang_tiered_lab.trace.tally import BadRowError, Tally
from sglang_tiered_lab.trace.text import Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sglang_tiered_lab.trace.request import TraceRequest
    from sglang_tiered_lab.trace.rows import Row


# The requests of a row, and what of it was left out.
_Decode: TypeAlias = "Callable[[Row], tuple[list[TraceRequest], BadRowError | None]]"

# Rows that are looked at before the first is read, for the size of blocks: so many, or so long.
_FIRST_ROWS = 1000
_FIRST_BYTES = 1 << 20


def read_trace(
    path: Path | None = None,
    *,
    format: Format | None = None,
    tally: Tally | None = None,
    tokens: Tokens | None = None,
    block_tokens: int | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Iterator[TraceRequest]:
    """The requests of a trace file, in the order of the file.

    ``path`` is looked up as ``source.find`` says. ``format`` is told from the content unless given.
    Without ``tally``, the first bad row raises ``TraceError``; with one, bad rows are counted in it
    unless it is strict, and its ``check`` is made at the end. ``tokens`` says how text becomes
    tokens, and the size of blocks where a file has none. ``block_tokens`` is the size of blocks
    that the file names without their size. ``on_bytes`` is told after every row how far in the file
    the reader is.

    Memory: some rows and a buffer, and a time for each session of a file that has sessions. What
    concerns the whole file raises ``TraceError`` before the first request.
    """
    tally = Tally(strict=True) if tally is None else tally
    found = find(path)
    opened = open_trace(found)
    try:
        source = _Source(found, opened, _form(opened, found, format), on_bytes)
        rows = _rows(source)
        first = list(_first(rows)) if source.form.format is not Format.SHAREGPT else []
        decode, note = _decoder(source.form, tokens or Tokens(BLOCK_TOKENS), block_tokens, first)
    except BaseException:
        opened.file.close()
        raise
    if note is not None:
        tally.notes.append(f"{found}: {note}")
    if source.form.format is Format.AZURE:
        first = first[1:]
    return _requests(source, itertools.chain(first, rows), decode, tally)


class _Source(NamedTuple):
    path: Path
    opened: Opened
    form: Form
    on_bytes: Callable[[int], None] | None

    def name(self, row: Row) -> str:
        if self.form.layout is Layout.LINES:
            return f"line {row.line} of {self.path}"
        if self.form.layout is Layout.PARQUET:
            return f"row {row.number} of {self.path}"
        return f"row {row.number} (line {row.line}) of {self.path}"


def _form(opened: Opened, path: Path, format: Format | None) -> Form:
    if not opened.head.startswith(PARQUET):
        return form_of(opened.head, path, format)
    names = {name.lower() for name in parquet_names(path)}
    known = detect(names) if format is None else format
    if known is None:
        columns = ascii(", ".join(sorted(names))[:80])
        raise TraceError(
            f"{path} is in no known format (its columns are {columns}); expected {KNOWN}, or say "
            "which with --format."
        )
    return Form(known, Layout.PARQUET, "timestamp" in names)


def _rows(source: _Source) -> Iterator[Row]:
    layout = source.form.layout
    with reading(source.path):
        if layout is Layout.PARQUET:
            yield from parquet_rows(source.path)
        elif layout is Layout.LINES:
            yield from line_rows(source.opened.file)
        else:
            yield from json_rows(source.opened.file, layout)


def _first(rows: Iterator[Row]) -> Iterator[Row]:
    num_bytes = 0
    for row in itertools.islice(rows, _FIRST_ROWS):
        yield row
        num_bytes += len(row.data)
        if num_bytes > _FIRST_BYTES:
            return


def _decoder(
    form: Form, tokens: Tokens, block_tokens: int | None, first: list[Row]
) -> tuple[_Decode, str | None]:
    if form.format is Format.SHAREGPT:
        talks = ConversationReader(tokens, has_times=form.has_times)
        return talks.decode, talks.note
    reader: BlockReader | TableReader
    if form.format is Format.AZURE:
        reader = TableReader(first[0].data if first else b"", tokens.block_tokens)
    else:
        reader = BlockReader(
            form.format, has_times=form.has_times, block_tokens=block_tokens, first=first
        )
    return lambda row: ([reader.decode(row)], None), reader.note


def _requests(
    source: _Source, rows: Iterator[Row], decode: _Decode, tally: Tally
) -> Iterator[TraceRequest]:
    with source.opened.file:
        for row in rows:
            tally.num_rows += 1
            try:
                if row.problem:
                    raise BadRowError(row.problem)
                requests, problem = decode(row)
            except BadRowError as error:
                tally.skip(source.name(row), source.form.format.title, error)
                requests, problem = [], None
            if problem is not None:
                tally.repair(source.name(row), problem)
            tally.num_requests += len(requests)
            yield from requests
            if source.on_bytes is not None:
                source.on_bytes(source.opened.position())
    tally.check()
