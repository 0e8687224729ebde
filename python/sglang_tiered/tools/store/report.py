"""Prints what the tools report on stores: tables of entries, findings, and what it all comes to."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sglang_tiered.flags import format_bytes
from sglang_tiered.tools.terminal import print_lines, print_table, write_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from sglang_tiered.storage.region.walk import Problem
    from sglang_tiered.tools.store.scan import ScannedRegion

    Columns = Mapping[str, tuple[str, Callable[[Any], str]]]
    """By title the field, and how its value is written."""


MAX_LISTED = 50
"""So many of one kind are listed in a table for people; JSON has them all."""


def finish(
    arguments: argparse.Namespace, report: dict[str, Any], show: Callable[[dict[str, Any]], None]
) -> int:
    """Print a report, as JSON or for people. Returns the exit code."""
    if arguments.json:
        write_json(report)
    else:
        show(report)
    return 0 if report.get("ok", True) else 1


def print_entries(
    entries: Sequence[dict[str, Any]],
    columns: Columns,
    total: dict[str, Any] | None = None,
) -> None:
    """Print a table of entries, and their total where there is not just one. The first column
    names an entry."""
    rows = [
        [text(entry[field]) for field, text in columns.values()] for entry in entries[:MAX_LISTED]
    ]
    if total is not None and len(entries) != 1:
        _, *others = columns.values()
        rows.append(["total", *(text(total[field]) for field, text in others)])
    print_table([*columns], rows)
    print_lines([""])


def digest(value: str) -> str:
    """Write as much of a digest as tells it from others."""
    return value[:16] if int(value, 16) else "none"


def number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def size(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)


def age(seconds: float | None) -> str:
    return "-" if seconds is None else str(timedelta(seconds=int(seconds)))


def speed(nbytes: int, seconds: float) -> dict[str, float]:
    rate = nbytes / 1e6 / seconds if seconds else 0.0
    return {"bytes_read": nbytes, "seconds": seconds, "mb_per_s": rate}


def print_damage(problems: Sequence[str], notes: Sequence[str]) -> None:
    """Print the first findings, how many more there are, and what is to be noted."""
    more = len(problems) - MAX_LISTED
    rest = [f"and {more:,} more; --json lists all"] if more > 0 else []
    print_lines(f"damage: {text}" for text in (*problems[:MAX_LISTED], *rest))
    print_lines(f"note: {text}" for text in notes)


def print_verdict(report: dict[str, Any], damage: str) -> None:
    """Print the last lines of what was verified."""
    took = (
        f"read {format_bytes(report['bytes_read'])} in {report['seconds']:.1f} s, "
        f"{report['mb_per_s']:,.0f} MB/s"
    )
    if report["ok"]:
        print_lines([f"fine: all {report['total']['pages']:,} pages verify; {took}"])
        return
    print_lines(
        [
            f"damaged: {damage}; {took}",
            "a server never serves a damaged page: it is a miss, and computed again",
        ]
    )


def problem_json(
    shard: str, problem: Problem, view: ScannedRegion | None, file: str = ""
) -> dict[str, Any]:
    """Describe what is wrong in a region, or in another file of a shard."""
    return {
        "shard": shard,
        "region": None if view is None else view.sequence,
        "file": file if view is None else view.name,
        "part": problem.part,
        "offset": problem.offset,
        "length": problem.length,
        "extent": problem.ordinal,
        "namespace": problem.namespace.hex() or None,
        "key": problem.key.hex() or None,
        "problem": problem.what,
    }


def problem_text(problem: dict[str, Any]) -> str:
    """Return one line for one entry of ``problem_json``."""
    part = problem["part"]
    if part == "page":
        part = f"page {problem['key'][:16]} of extent {problem['extent']}"
    elif part == "extent":
        part = f"extent {problem['extent']}"
    place = "" if problem["part"] == "file" else f" at {problem['offset']}"
    if place and problem["length"]:
        place += f" ({problem['length']} bytes)"
    return f"{problem['shard']}/{problem['file']}: {part}{place} {problem['problem']}"
