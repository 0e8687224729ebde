"""Finds a trace file and opens it, unpacked where it is a gzip file."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import stat
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from sglang_tiered.errors import TraceError
from sglang_tiered_lab.trace.forms import KNOWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


DATA_VARIABLE = "SGLANG_TIERED_DATA"
"""Names a folder of traces; a path that does not exist is also looked for in it."""

_HEAD_BYTES = 1 << 20
_MAX_LISTED = 8
_TRACES = ("*.json", "*.jsonl", "*.json.gz", "*.jsonl.gz", "*.csv", "*.csv.gz", "*.parquet")
_GZIP = b"\x1f\x8b"
PARQUET = b"PAR1"
"""How a Parquet file begins."""

# What people pass by mistake, by how it begins.
_FOREIGN = (
    (_GZIP, "is gzip-compressed twice; unpack it first: gunzip -k"),
    (b"\x28\xb5\x2f\xfd", "is zstd-compressed; unpack it first: zstd -d"),
    (b"\xfd7zXZ", "is xz-compressed; unpack it first: xz -dk"),
    (b"BZh", "is bzip2-compressed; unpack it first: bunzip2 -k"),
    (b"PK\x03\x04", "is a zip archive; unpack it first: unzip"),
    (b"\xff\xfe", "is UTF-16; convert it to UTF-8 first, for instance with iconv:"),
    (b"\xfe\xff", "is UTF-16; convert it to UTF-8 first, for instance with iconv:"),
    (
        b"version https://git-lfs",
        "is a Git LFS pointer, not the trace itself; fetch it where it came from, with git lfs "
        "pull:",
    ),
    (b"<", "looks like a web page, not a trace; the download went wrong:"),
)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Opened(NamedTuple):
    """A file of rows. ``position`` says how far it is read, in bytes of the file on disk."""

    file: BinaryIO
    head: bytes
    position: Callable[[], int]


def find(path: Path | None) -> Path:
    """The trace file meant by ``path``: as given, or below ``$SGLANG_TIERED_DATA``.

    ``None`` means that folder. A folder with one trace in it means that trace. Raises
    ``TraceError``, also for what is no regular file.
    """
    data = os.environ.get(DATA_VARIABLE)
    if path is None:
        if not data:
            raise TraceError(
                f"no trace was given; name a file, or set {DATA_VARIABLE} to a folder of traces."
            )
        path = Path(data)
    elif data and not path.is_absolute() and not _exists(path):
        below = Path(data) / path
        path = below if _exists(below) else path
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        what = error.strerror if isinstance(error, OSError) else "not a file name"
        hint = "check the path" if data else f"check the path, or set {DATA_VARIABLE} to its folder"
        raise TraceError(f"{path} cannot be read ({what}); {hint}.") from error
    if stat.S_ISDIR(mode):
        return _only_trace(path)
    if not stat.S_ISREG(mode):
        raise TraceError(f"{path} is not a regular file; write the trace to a file first.")
    return path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _only_trace(folder: Path) -> Path:
    try:
        names = sorted(
            found
            for pattern in _TRACES
            for found in (*folder.glob(pattern), *folder.glob(f"*/{pattern}"))
            if found.is_file()
        )
    except OSError as error:
        raise TraceError(f"{folder} cannot be listed ({error.strerror}); check it.") from error
    if len(names) == 1:
        return names[0]
    if not names:
        raise TraceError(
            f"{folder} is a folder without .json, .jsonl, .csv or .parquet files; name a trace."
        )
    listed = ", ".join(str(name.relative_to(folder)) for name in names[:_MAX_LISTED])
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    raise TraceError(f"{folder} is a folder; name one of its files: {listed}{more}.")


def open_trace(path: Path) -> Opened:
    """The file, unpacked and positioned after a byte order mark, and its first bytes. Raises
    ``TraceError`` for what cannot be a trace: empty, packed otherwise, binary."""
    try:
        raw = io.BufferedReader(path.open("rb", buffering=0), _HEAD_BYTES)
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else "not a file name"
        raise TraceError(f"{path} cannot be read ({what}); check the path.") from error
    file: BinaryIO = raw
    try:
        with reading(path):
            if raw.peek(len(_GZIP)).startswith(_GZIP):
                file = _Unpacked(raw)
            return Opened(file, _head(file, path), raw.tell)
    except BaseException:
        file.close()
        raise


class _Unpacked(io.BufferedReader):
    """Unpacks a gzip file on the way, and closes it."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__(gzip.GzipFile(fileobj=raw), _HEAD_BYTES)
        self._packed = raw

    def close(self) -> None:
        super().close()
        self._packed.close()


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what a disk or a packed file may raise into ``TraceError``."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"{path} is damaged or cut off (its gzip data end too early); fetch it again."
        ) from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read on ({error.strerror}); check its disk.") from error


def _head(file: BinaryIO, path: Path) -> bytes:
    head = file.read(_HEAD_BYTES)
    mark = len(_BYTE_ORDER_MARK) if head.startswith(_BYTE_ORDER_MARK) else 0
    file.seek(mark)
    head = head[mark:]
    for magic, what in _FOREIGN:
        if head.startswith(magic):
            raise TraceError(f"{path} {what} {path.name}.")
    if head.startswith(PARQUET):
        return head
    if b"\0" in head:
        raise TraceError(f"{path} is a binary file, not a trace; expected {KNOWN}.")
    if not head.strip():
        raise TraceError(f"{path} is empty; expected {KNOWN}.")
    return head
