"""Finds and opens a trace file, and tells its format from its first bytes."""

from __future__ import annotations

import enum
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_tiered.errors import TraceError

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["DATA_VARIABLE", "Format", "detect", "find", "open_trace"]

DATA_VARIABLE = "SGLANG_TIERED_DATA"
"""Names a folder of traces; a path that does not exist is also looked for in it."""

_HEAD_BYTES = 1 << 20
_MAX_LISTED = 8
_KNOWN = "ShareGPT JSON or Mooncake JSON lines"

# What people pass by mistake, by how it begins.
_FOREIGN = (
    (b"\x1f\x8b", "is gzip-compressed; unpack it first: gunzip -k"),
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
    (b"PAR1", "is a Parquet file; export it as JSON lines first:"),
    (b"<", "looks like a web page, not a trace; the download went wrong:"),
)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Format(enum.Enum):
    SHAREGPT = "sharegpt"
    MOONCAKE = "mooncake"

    @property
    def title(self) -> str:
        return {"sharegpt": "ShareGPT", "mooncake": "Mooncake"}[self.value]


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
            for pattern in ("*.json", "*.jsonl", "*/*.json", "*/*.jsonl")
            for found in folder.glob(pattern)
            if found.is_file()
        )
    except OSError as error:
        raise TraceError(f"{folder} cannot be listed ({error.strerror}); check it.") from error
    if len(names) == 1:
        return names[0]
    if not names:
        raise TraceError(f"{folder} is a folder without .json or .jsonl files; name a trace.")
    listed = ", ".join(str(name.relative_to(folder)) for name in names[:_MAX_LISTED])
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    raise TraceError(f"{folder} is a folder; name one of its files: {listed}{more}.")


def open_trace(path: Path) -> tuple[BinaryIO, bytes]:
    """The file, positioned after a byte order mark, and its first bytes. Raises ``TraceError`` for
    what cannot be a trace: empty, compressed, binary."""
    try:
        file = path.open("rb", buffering=_HEAD_BYTES)
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else "not a file name"
        raise TraceError(f"{path} cannot be read ({what}); check the path.") from error
    try:
        head = _head(file, path)
    except BaseException:
        file.close()
        raise
    return file, head


def _head(file: BinaryIO, path: Path) -> bytes:
    try:
        head = file.read(_HEAD_BYTES)
        if head.startswith(_BYTE_ORDER_MARK):
            head = head[len(_BYTE_ORDER_MARK) :]
            file.seek(len(_BYTE_ORDER_MARK))
        else:
            file.seek(0)
    except OSError as error:
        raise TraceError(f"{path} cannot be read ({error.strerror}); check it.") from error
    for magic, what in _FOREIGN:
        if head.startswith(magic):
            raise TraceError(f"{path} {what} {path.name}.")
    if b"\0" in head:
        raise TraceError(f"{path} is a binary file, not a trace; expected {_KNOWN}.")
    if not head.strip():
        raise TraceError(f"{path} is empty; expected {_KNOWN}.")
    return head


def detect(head: bytes, path: Path) -> Format:
    """The format, by the keys in the first bytes. Raises ``TraceError`` where none is known."""
    if b'"hash_ids"' in head:
        return Format.MOONCAKE
    if b'"conversations"' in head or head.split() == [b"[]"]:
        return Format.SHAREGPT
    head = head.lstrip()
    beginning = ascii(head.split(b"\n", 1)[0][:40].decode("utf-8", "replace"))
    raise TraceError(
        f"{path} is in no known format (line 1 begins with {beginning}); expected {_KNOWN}, or say "
        "which with --format."
    )
