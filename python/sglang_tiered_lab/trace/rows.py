"""Cuts a file into rows without reading it whole: a JSON value a line, or the elements of a JSON
array or object, or JSON values one after the other, or the rows of a Parquet file.

A row that is damaged must not cost the rows after it. Lines take care of themselves; elsewhere
brackets are counted by kind, so that a missing one ends with its row, and where a quote is missing
the search goes on at the next thing that looks like the start of a row.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec

from sglang_tiered.errors import TraceError
from sglang_tiered.flags import require
from sglang_tiered_lab.trace.forms import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


MAX_ROW_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20

# A whole string, a bracket, or a quote whose string does not end in the buffer.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[][{}]|"', re.DOTALL)
_NEXT_ROW = re.compile(
    rb'\{\s*"(?:id|conversations?|messages|items|timestamp|session_id|chat_id)"\s*:'
)
_NAME = re.compile(rb'\A(.*?)("(?:[^"\\]|\\.)*+")\s*:\s*\Z', re.DOTALL)
_NEXT_ROW_BYTES = 64  # kept when looking for one, as it may begin before the end of a chunk
_BLANK = b" \t\r\n,"
_OPENING = {ord("}"): ord("{"), ord("]"): ord("[")}
_OUTER = {Layout.ARRAY: b"[", Layout.OBJECT: b"{", Layout.VALUES: b""}
_ENDS = {Layout.ARRAY: (b"]", b"]}"), Layout.OBJECT: (b"}",), Layout.VALUES: (b"",)}
_PARQUET_ROWS = 64  # read at once


class Row(NamedTuple):
    number: int  # from 1
    line: int  # where it begins, from 1
    data: bytes
    problem: str | None = None  # why it cannot be decoded, where the file's structure says so
    name: str | None = None  # its key, in an object of rows


def line_rows(file: BinaryIO, max_bytes: int = MAX_ROW_BYTES) -> Iterator[Row]:
    """Every line that is not blank. ``Row.number`` is the line number."""
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes:
            while line and not line.endswith(b"\n"):
                line = file.readline(max_bytes)
            yield Row(number, number, b"", f"it is longer than {max_bytes:,} bytes")
        elif line.strip():
            yield Row(number, number, line)


def json_rows(
    file: BinaryIO, layout: Layout = Layout.ARRAY, max_bytes: int = MAX_ROW_BYTES
) -> Iterator[Row]:
    """The elements of the JSON array or object that the file is, or the values in it."""
    return _Cutter(file, layout, max_bytes).rows()


def parquet_names(path: Path) -> list[str]:
    """The columns of a Parquet file. Raises ``TraceError``."""
    return list(_parquet(path).schema_arrow.names)


def parquet_rows(path: Path) -> Iterator[Row]:
    """The rows of a Parquet file, each as JSON."""
    file = _parquet(path)
    number = 0
    try:
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield Row(number, number, msgspec.json.encode(row, enc_hook=str))
    except (ValueError, OSError) as error:  # pyarrow's own are both
        raise _unreadable(path, error) from error
    finally:
        file.close()


def _parquet(path: Path) -> Any:
    require(f"{path}, a Parquet file,", "pyarrow")
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> TraceError:
    what = ascii(str(error).split("\n", 1)[0].rstrip("."))[1:-1]
    return TraceError(f"{path} cannot be read as Parquet ({what}); check it, or fetch it again.")


class _Cutter:
    """Holds at most one row and one chunk of the file."""

    def __init__(self, file: BinaryIO, layout: Layout, max_bytes: int) -> None:
        self._file = file
        self._layout = layout
        self._max_bytes = max_bytes
        self._buffer = b""
        self._start = 0  # of the row, or of what lies between two rows
        self._next = 0  # where to look for the next token
        self._open = bytearray()  # brackets of the row that are not closed yet
        self._number = 0
        self._line = 1  # of _start
        self._name: str | None = None  # of the row
        self._done = False

    def rows(self) -> Iterator[Row]:
        self._fill()
        outer = _OUTER[self._layout]
        self._next = self._buffer.find(outer) + len(outer)
        self._advance(self._next)
        while not self._done:
            token = _TOKEN.search(self._buffer, self._next)
            if token is None or token[0] == b'"':
                self._next = len(self._buffer) if token is None else token.start()
                yield from self._read_on()
                continue
            self._next = token.end()
            if token[0] in b"[{":
                yield from self._opened(token)
            elif token[0] in b"]}":
                yield from self._closed(token)

    def _read_on(self) -> Iterator[Row]:
        """More of the file, or, where there is none or the row is too long, the end of the row."""
        if len(self._buffer) - self._start > self._max_bytes:
            yield self._give_up(f"it is longer than {self._max_bytes:,} bytes")
        elif not self._fill():
            if self._open:
                yield self._give_up("the file ends inside it")
            else:
                yield from self._ended()
            self._done = self._start == len(self._buffer)

    def _ended(self) -> Iterator[Row]:
        """What lies between the last row and the end of the file should be the closing bracket."""
        gap = self._buffer[self._start :].strip(_BLANK)
        end, ends = len(self._buffer), _ENDS[self._layout]
        if b"".join(gap.split()) in ends:
            self._advance(end)
        elif not gap:
            yield self._row(end, "the file ends without closing its list")
        elif gap.startswith(ends[0]):
            yield self._row(end, "it comes after the end of the list")
        elif gap.endswith(ends[0]):
            yield self._row(end, "it is no conversation")
        else:
            yield self._give_up("the file ends inside it")

    def _opened(self, token: re.Match[bytes]) -> Iterator[Row]:
        if not self._open:
            gap = self._buffer[self._start : token.start()].strip(_BLANK)
            named = _NAME.match(gap) if self._layout is Layout.OBJECT else None
            if named is not None:
                gap = named[1].strip(_BLANK)
            if gap:
                yield self._row(token.start(), "it is no conversation")
            self._name = None if named is None else _text(named[2])
            self._advance(token.start())
        self._open.append(token[0][0])

    def _closed(self, token: re.Match[bytes]) -> Iterator[Row]:
        # A bracket that closes nothing of a row is the list's own only if nothing follows.
        if self._open:
            self._close(_OPENING[token[0][0]])
            if not self._open:
                yield self._row(token.end())

    def _close(self, opening: int) -> None:
        """Closes the innermost bracket of that kind, and those within that were left open."""
        position = self._open.rfind(opening)
        if position >= 0:
            del self._open[position:]

    def _row(self, end: int, problem: str | None = None) -> Row:
        self._number += 1
        data = self._buffer[self._start : end]
        stripped = data.lstrip(_BLANK)
        line = self._line + data[: len(data) - len(stripped)].count(b"\n")
        row = Row(self._number, line, b"" if problem else stripped, problem, self._name)
        self._advance(end)
        return row

    def _advance(self, end: int) -> None:
        self._line += self._buffer.count(b"\n", self._start, end)
        self._start = end

    def _give_up(self, problem: str) -> Row:
        """Ends a row that does not end by itself at the next thing that looks like one."""
        found = _NEXT_ROW.search(self._buffer, self._start + 1)
        end = max(self._start + 1, len(self._buffer) - _NEXT_ROW_BYTES)
        row = self._row(found.start() if found else end, problem)
        while not found:
            more = self._fill()
            found = _NEXT_ROW.search(self._buffer)
            keep = 0 if not more else _NEXT_ROW_BYTES
            self._advance(found.start() if found else max(0, len(self._buffer) - keep))
            if not more:
                break
        self._next = self._start
        self._open.clear()
        return row

    def _fill(self) -> bool:
        """Drops what is done and reads on. A string that spans chunks doubles what is read."""
        self._buffer = self._buffer[self._start :]
        self._next -= self._start
        self._start = 0
        chunk = self._file.read(max(_CHUNK_BYTES, len(self._buffer)))
        self._buffer += chunk
        return bool(chunk)


def _text(key: bytes) -> str | None:
    try:
        return msgspec.json.decode(key, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
