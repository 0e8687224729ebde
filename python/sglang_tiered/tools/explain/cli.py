"""The command line of ``sglang-tiered explain``, and how it reads the files of a server."""

from __future__ import annotations

import argparse
import glob
import heapq
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import parse_duration
from sglang_tiered.request_log import VERSION, RequestRecord, older, rid_of
from sglang_tiered.tools.explain.report import (
    Summary,
    as_json,
    print_one,
    print_slowest,
    print_summary,
)
from sglang_tiered.tools.terminal import Parser, note, run_program, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Lines", "files_of", "main", "make_parser"]

MAX_SHOWN = 1000
_PROGRAM = "sglang-tiered explain"
_DESCRIPTION = """\
Why was this request slow? Reads the file of a server's --tier-log-requests, and
FILE.1 beside it (or FILE.replica0 and so on), and says where the time of its requests
went, with the cause of each slow one in a sentence, of measured parts. It needs no
server and changes nothing; a server may be writing.
"""
_EPILOG = f"""\
examples:
  {_PROGRAM} requests.jsonl
  {_PROGRAM} requests.jsonl --slower-than 2s
  {_PROGRAM} requests.jsonl --rid 7eacaf2722ca4e0fb1bfe9fbf28c8abd

exit code:
  0  fine
  1  no request of that id, or none that slow
  2  a command line or a file that cannot be used; one sentence says why
"""

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
    """The records of some files; what is no whole line of a known version is counted and skipped.
    Figures are of what was read so far."""

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Explain requests. Returns the exit code."""
    return run_program(lambda: _run(arguments))


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=_PROGRAM,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="of --tier-log-requests")
    parser.add_argument("--rid", help="one request whole, as a timeline; the last one of that id")
    parser.add_argument(
        "--slower-than", metavar="SECONDS", help="requests that took longer than this, all of them"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _run(arguments: Sequence[str] | None) -> int:
    given = make_parser().parse_args(arguments)
    if given.rid is not None and given.slower_than is not None:
        raise ConfigError("--rid and --slower-than exclude each other; drop one.")
    least_s = (
        None if given.slower_than is None else parse_duration("--slower-than", given.slower_than)
    )
    files = [file for name in given.files for file in files_of(Path(name))]
    lines = Lines(list(dict.fromkeys(files)))
    if given.rid is not None:
        code = _explain_one(lines, given.rid, is_json=given.json)
    else:
        code = _explain_all(lines, least_s, is_json=given.json)
    for complaint in lines.complaints():
        note(complaint)
    return code


def _explain_one(lines: Lines, rid: str, *, is_json: bool) -> int:
    found, wanted, num_found = None, rid_of(rid), 0
    for record in lines:
        if record.rid == wanted:
            found, num_found = record, num_found + 1
    if found is None:
        note(f"no request {rid} is in {lines.files[-1]}; it may not have ended yet.")
        return 1
    if is_json:
        write_json(as_json(found))
    else:
        print_one(found)
    if num_found > 1:
        note(f"{num_found:,} requests have this id, which clients choose; the last one is shown.")
    return 0


NUM_SLOWEST = 5


def _explain_all(lines: Lines, least_s: float | None, *, is_json: bool) -> int:
    summary, most = Summary(), NUM_SLOWEST if least_s is None else MAX_SHOWN
    slowest: list[tuple[float, int, RequestRecord]] = []  # a heap, the least slow first
    numbers, num_slower = itertools.count(), 0
    for record in lines:
        summary.add(record)
        if least_s is None or record.total_s > least_s:
            num_slower += 1
            item = (record.total_s, -next(numbers), record)
            if len(slowest) < most:
                heapq.heappush(slowest, item)
            else:
                heapq.heappushpop(slowest, item)
    records = [record for _, _, record in sorted(slowest, reverse=True)]
    if is_json:
        report = {
            "summary": summary.as_json(),
            "num_damaged_lines": lines.num_damaged,
            "num_lines_of_other_versions": lines.num_unknown,
            "requests": [as_json(record) for record in records],
        }
        write_json(report)
    elif least_s is None:
        print_summary(summary)
        if records:
            print_slowest(records)
    elif records:
        print_slowest(records)
    if num_slower > len(records) and least_s is not None:
        note(f"the {len(records):,} slowest of {num_slower:,} are shown.")
    if least_s is not None and not records:
        note(f"none of {summary.num_requests:,} requests took longer than {least_s:g} s.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
