"""Reads the lines of requests, those in ``FILE.1`` first. What is no whole line of a known version
is counted and skipped."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered.errors import ConfigError
from sglang_tiered.request_log import older
from sglang_tiered.request_record import VERSION, RequestRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["Lines", "files_of"]

MAX_LINE_BYTES = 1 << 20
"""Longer than any line that a server writes; one without an end is not read into memory."""


class _Version(msgspec.Struct):
    v: int


def files_of(path: Path) -> list[Path]:
    """Return the files that a server wrote under a name, the older first: ``FILE.1`` and ``FILE``,
    or those of its replicas. Raises ``ConfigError`` if there is none."""
    if not path.name:
        raise ConfigError(
            f"{path} is no ordinary file; name the file of a server's --tier-log-requests."
        )
    replicas = sorted(path.parent.glob(f"{glob.escape(path.name)}.replica*"))
    names = [path] if path.exists() else [one for one in replicas if not one.name.endswith(".1")]
    found = [file for name in names for file in (older(name), name) if file.exists()]
    if not found:
        raise ConfigError(
            f"{path} does not exist; name the file of a server's --tier-log-requests."
        )
    for file in found:
        if not file.is_file():
            raise ConfigError(
                f"{file} is no ordinary file; name the file of a server's --tier-log-requests."
            )
    return found


@dataclass(slots=True)
class Lines:
    """The records of some files. Figures are of what was read so far."""

    files: Sequence[Path]
    num_records: int = 0
    num_damaged: int = 0
    num_unknown: int = 0  # of another version

    def __iter__(self) -> Iterator[RequestRecord]:
        """Yield the records. Raises ``ConfigError`` at the end of files that hold something else,
        and nothing of this."""
        decoder = msgspec.json.Decoder(RequestRecord)
        for file in self.files:
            for line in _lines(file):
                record = self._decoded(decoder, line)
                if record is not None:
                    self.num_records += 1
                    yield record
        if self.num_damaged and not self.num_records and not self.num_unknown:
            raise ConfigError(
                f"{self.files[-1]} holds no line that a server writes with --tier-log-requests; "
                "name that file."
            )

    def _decoded(
        self, decoder: msgspec.json.Decoder[RequestRecord], line: bytes
    ) -> RequestRecord | None:
        try:
            record = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._count_undecoded(line)
            return None
        if record.v != VERSION:
            self.num_unknown += 1
            return None
        return record

    def _count_undecoded(self, line: bytes) -> None:
        try:
            is_other = msgspec.json.decode(line, type=_Version).v != VERSION
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            is_other = False
        if is_other:
            self.num_unknown += 1
        else:
            self.num_damaged += 1

    def complaints(self) -> list[str]:
        """Return what was skipped: a sentence each."""
        found = []
        if self.num_damaged:
            found.append(f"{self.num_damaged:,} damaged or half lines were skipped.")
        if self.num_unknown:
            found.append(
                f"{self.num_unknown:,} lines of another version than {VERSION} were skipped; read "
                "them with the sglang-tiered that wrote them."
            )
        return found


def _lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while line := opened.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                while (rest := opened.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                line = b"{"  # none that was ever whole
            if line.strip():
                yield line
