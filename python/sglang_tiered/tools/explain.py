"""The command ``sglang-tiered explain``: how it reads the files of a server, and what it prints: of
a file, of the slowest requests in it, and of one."""

from __future__ import annotations

import argparse
import glob
import heapq
import itertools
import math
import statistics
import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import parse_duration
from sglang_tiered.request_log import VERSION, RequestRecord, older, rid_of
from sglang_tiered.tools.causes import NAMES, cause, parts, seconds
from sglang_tiered.tools.terminal import (
    Parser,
    note,
    print_lines,
    print_table,
    run_program,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_SOURCES = ("device", "host", "nvme", "object", "peer", "computed")


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

NUM_SLOWEST = 5


@dataclass(slots=True)
class Summary:
    """Figures of all requests that were read."""

    num_requests: int = 0
    first_unix_s: float = math.inf
    last_unix_s: float = 0.0
    total_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    num_tokens: Counter[str] = field(default_factory=Counter)  # by source
    parts_s: dict[str, float] = field(default_factory=dict)
    decisions: Counter[str] = field(default_factory=Counter)
    given_up: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)

    def add(self, record: RequestRecord) -> None:
        self.num_requests += 1
        self.first_unix_s = min(record.arrived_unix_s, self.first_unix_s)
        self.last_unix_s = max(record.arrived_unix_s, self.last_unix_s)
        self.total_s.append(record.total_s)
        if record.first_token_s is not None:
            self.first_token_s.append(record.first_token_s)
        self.num_tokens.update({name: getattr(record.tokens, f"num_{name}") for name in _SOURCES})
        for part in parts(record):
            self.parts_s[part.name] = self.parts_s.get(part.name, 0.0) + part.seconds
        if record.plan is not None:
            self.decisions[record.plan.decision] += 1
        if record.given_up is not None:
            self.given_up[record.given_up.why] += 1
        self.ends[record.end] += 1

    def as_json(self) -> dict[str, Any]:
        return {
            "num_requests": self.num_requests,
            "first_arrived_unix_s": self.first_unix_s if self.num_requests else 0.0,
            "last_arrived_unix_s": self.last_unix_s,
            "total_s": _spread(self.total_s),
            "first_token_s": _spread(self.first_token_s),
            "num_tokens": self.num_tokens,
            "parts_s": {name: round(took, 6) for name, took in self.parts_s.items()},
            "decisions": self.decisions,
            "given_up": self.given_up,
            "ends": self.ends,
        }


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the 95th percentile and the largest."""
    if not values:
        return {}
    cuts = statistics.quantiles(values, n=20) if len(values) > 1 else [values[0]] * 19
    p95 = min(cuts[18], max(values))
    return {"p50": statistics.median(values), "p95": p95, "max": max(values)}


def as_json(record: RequestRecord) -> dict[str, Any]:
    """Return a request with its cause."""
    return {
        "rid": record.rid,
        "cause": cause(record),
        "parts": [part._asdict() for part in parts(record)],
        "record": msgspec.to_builtins(record),
    }


def print_summary(summary: Summary) -> None:
    if not summary.num_requests:
        print_lines(["no request was recorded"])
        return
    at = [_moment(when) for when in (summary.first_unix_s, summary.last_unix_s)]
    print_lines([f"{summary.num_requests:,} requests, arrived from {at[0]} to {at[1]}"])
    rows = []
    for name, values in (("first token", summary.first_token_s), ("whole", summary.total_s)):
        spread = _spread(values)
        if spread:
            rows.append((name, *(f"{seconds(spread[key])} s" for key in ("p50", "p95", "max"))))
    print_table(("", "p50", "p95", "max"), rows)
    num_tokens, took_s = summary.num_tokens.total(), sum(summary.parts_s.values())
    print_table(
        ("prompt tokens", "number", "share"),
        [
            (name, f"{number:,}", _share(number, num_tokens))
            for name, number in summary.num_tokens.items()
            if number
        ],
    )
    print_table(
        ("where the time went", "seconds", "share"),
        [
            (NAMES[name], seconds(took), _share(took, took_s))
            for name, took in sorted(summary.parts_s.items(), key=lambda part: -part[1])
        ],
    )
    said = [
        f"{what}: " + ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
        for what, counts in (("plans", summary.decisions), ("given up", summary.given_up))
        if counts
    ]
    print_lines(said)


def print_slowest(records: Sequence[RequestRecord]) -> None:
    print_table(
        ("request", "why", "whole", "first token"),
        [
            (
                record.rid,
                cause(record),
                f"{seconds(record.total_s)} s",
                "never" if record.first_token_s is None else f"{seconds(record.first_token_s)} s",
            )
            for record in records
        ],
        left=2,
    )


def print_one(record: RequestRecord) -> None:
    """Print one request as a timeline, with what was planned and what was read."""
    of = f", replica {record.replica}" if record.replica else ""
    tenant = f", tenant {record.tenant}" if record.tenant else ""
    print_lines(
        [
            f"request {record.rid}, arrived at {_moment(record.arrived_unix_s)}{of}{tenant}",
            f"{record.num_prompt_tokens:,} tokens in, {record.num_output_tokens:,} out, "
            f"ended by {record.end} after {seconds(record.total_s)} s",
            cause(record),
        ]
    )
    print_table(
        ("what", "from", "took", "share"),
        [
            (
                NAMES[part.name],
                f"{part.at_s:.3f} s",
                f"{part.seconds:.3f} s",
                _share(part.seconds, record.total_s),
            )
            for part in parts(record)
        ],
    )
    print_lines(_details(record))


def _details(record: RequestRecord) -> list[str]:
    """Return the rest of its line, part by part, by the names of its fields."""
    told = msgspec.to_builtins(record)
    tiers = told["load"].pop("tiers", ()) if "load" in told else ()
    shown = [(name, told[name]) for name in ("tokens", "lookup", "plan", "load") if name in told]
    shown += [(tier.pop("tier"), tier) for tier in tiers]
    shown += [(name, told[name]) for name in ("given_up", "copy", "prefill") if name in told]
    return [
        f"{name}: " + ", ".join(f"{key} {value}" for key, value in part.items())
        for name, part in shown
    ]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 else "-"


def _moment(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return "an unknown time"


class _Version(msgspec.Struct):
    v: int


def files_of(path: Path) -> list[Path]:
    """Return the files that a server wrote under a name, the older first: ``FILE.1`` and ``FILE``,
    or those of its replicas. Raises ``ConfigError`` if there is none."""
    replicas = sorted(path.parent.glob(f"{glob.escape(path.name)}.replica*"))
    names = [path] if path.is_file() else [one for one in replicas if not one.name.endswith(".1")]
    found = [file for name in names for file in (older(name), name) if file.is_file()]
    if not found:
        raise ConfigError(
            f"{path} does not exist or is no ordinary file; name the file of a server's "
            "--tier-log-requests."
        )
    return found


def records_of(files: Sequence[Path], skipped: Counter[str]) -> Iterator[RequestRecord]:
    """Yield the records of some files. What is no whole line of a known version is counted in
    ``skipped``: as ``damaged``, or ``unknown`` of another version. Raises ``ConfigError`` at the
    end of files that hold something else, and nothing of this."""
    is_any = False
    for line in itertools.chain.from_iterable(map(_lines, files)):
        try:
            if msgspec.json.decode(line, type=_Version).v != VERSION:
                skipped["unknown"] += 1
                continue
            record = msgspec.json.decode(line, type=RequestRecord)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            skipped["damaged"] += 1
        else:
            is_any = True
            yield record
    if skipped["damaged"] and not is_any and not skipped["unknown"]:
        raise ConfigError(
            f"{files[-1]} holds no line that a server writes with --tier-log-requests; name that "
            "file."
        )


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
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--rid", help="one request whole, as a timeline; the last one of that id")
    chosen.add_argument(
        "--slower-than", metavar="SECONDS", help="requests that took longer than this, all of them"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _run(arguments: Sequence[str] | None) -> int:
    given = make_parser().parse_args(arguments)
    least_s = (
        None if given.slower_than is None else parse_duration("--slower-than", given.slower_than)
    )
    found = [file for name in given.files for file in files_of(Path(name))]
    files, skipped = list(dict.fromkeys(found)), Counter[str]()
    if given.rid is not None:
        code = _explain_one(files, skipped, given.rid, is_json=given.json)
    else:
        code = _explain_all(files, skipped, least_s, is_json=given.json)
    if skipped["damaged"]:
        note(f"{skipped['damaged']:,} damaged or half lines were skipped.")
    if skipped["unknown"]:
        note(
            f"{skipped['unknown']:,} lines of another version than {VERSION} were skipped; read "
            "them with the sglang-tiered that wrote them."
        )
    return code


def _explain_one(files: Sequence[Path], skipped: Counter[str], rid: str, *, is_json: bool) -> int:
    found, wanted, num_found = None, rid_of(rid), 0
    for record in records_of(files, skipped):
        if record.rid == wanted:
            found, num_found = record, num_found + 1
    if found is None:
        note(f"no request {rid} is in {files[-1]}; it may not have ended yet.")
        return 1
    if is_json:
        write_json(as_json(found))
    else:
        print_one(found)
    if num_found > 1:
        note(f"{num_found:,} requests have this id, which clients choose; the last one is shown.")
    return 0


def _explain_all(
    files: Sequence[Path], skipped: Counter[str], least_s: float | None, *, is_json: bool
) -> int:
    summary, num_slower = Summary(), 0

    def slower() -> Iterator[RequestRecord]:
        nonlocal num_slower
        for record in records_of(files, skipped):
            summary.add(record)
            if least_s is None or record.total_s > least_s:
                num_slower += 1
                yield record

    most = NUM_SLOWEST if least_s is None else MAX_SHOWN
    records = heapq.nlargest(most, slower(), key=lambda record: record.total_s)
    if is_json:
        report = {
            "summary": summary.as_json(),
            "num_damaged_lines": skipped["damaged"],
            "num_lines_of_other_versions": skipped["unknown"],
            "requests": [as_json(record) for record in records],
        }
        write_json(report)
    else:
        if least_s is None:
            print_summary(summary)
        if records:
            print_slowest(records)
    if num_slower > len(records) and least_s is not None:
        note(f"the {len(records):,} slowest of {num_slower:,} are shown.")
    if least_s is not None and not records:
        note(f"none of {summary.num_requests:,} requests took longer than {least_s:g} s.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
