"""Prints what the tools report on stores: ages, holders, findings, and what it all comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_tiered.config import format_bytes
from sglang_tiered.tools.store.target import Holder
from sglang_tiered.tools.terminal import write_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from sglang_tiered.storage.region.walk import Problem
    from sglang_tiered.tools.store.scan import ScannedRegion
    from sglang_tiered.tools.store.target import StoreTarget

__all__ = [
    "MAX_LISTED",
    "age_text",
    "describe",
    "finish",
    "holder_json",
    "listed",
    "number_text",
    "problem_json",
    "problem_text",
    "speed",
    "verdict",
    "with_total",
]

MAX_LISTED = 50
"""So many findings of one kind are listed in a table for people; JSON has them all."""


def finish(
    arguments: argparse.Namespace, report: dict[str, Any], show: Callable[[dict[str, Any]], None]
) -> int:
    """Print a report, as JSON or for people. Returns the exit code."""
    if arguments.json:
        write_json(report)
    else:
        show(report)
    return 0 if report.get("ok", True) else 1


def listed(texts: Sequence[str], what: str = "") -> list[str]:
    """Return the lines of the first findings, and one that says how many more there are."""
    more = len(texts) - MAX_LISTED
    rest = [f"and {more:,} more; --json lists all"] if more > 0 else []
    return [what + text for text in (*texts[:MAX_LISTED], *rest)]


def with_total(
    entries: Sequence[dict[str, Any]], total: dict[str, Any], field: str = "name"
) -> list[dict[str, Any]]:
    """Return the rows of a table, and their total where there is not just one."""
    rows = list(entries[:MAX_LISTED] if field == "namespace" else entries)
    return rows if len(entries) == 1 else [*rows, {field: "total", **total}]


def speed(nbytes: int, seconds: float) -> dict[str, float]:
    rate = nbytes / 1e6 / seconds if seconds else 0.0
    return {"bytes_read": nbytes, "seconds": seconds, "mb_per_s": rate}


def verdict(report: dict[str, Any], damage: str, requests: str = "") -> list[str]:
    """Return the last lines of what was verified."""
    took = (
        f"read {format_bytes(report['bytes_read'])} in {report['seconds']:.1f} s{requests}, "
        f"{report['mb_per_s']:,.0f} MB/s"
    )
    if report["ok"]:
        return [f"fine: all {report['total']['pages']:,} pages verify; {took}"]
    return [
        f"damaged: {damage}; {took}",
        "a server never serves a damaged page: it is a miss, and computed again",
    ]


def number_text(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def age_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    seconds = int(seconds)
    for size, unit, smaller_size, smaller in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if seconds >= size:
            return f"{seconds // size}{unit} {seconds % size // smaller_size}{smaller}"
    return f"{seconds}s"


def describe(
    target: StoreTarget, holder: Holder, shards: Sequence[dict[str, Any]] = ()
) -> list[str]:
    """Return the lines before a table: what DIR is, and who uses it and each shard."""
    if target.is_tier:
        version = "format unknown" if target.manifest is None else f"format {target.manifest}"
        lines = [f"{target.path}: tier directory, {version}, {holder}"]
    else:
        lines = [f"{target.path}: shard directory"]
    for shard in shards:
        lines.append(f"{shard['name']}: {Holder(**shard['lock'])}")
    return [*lines, ""]


def holder_json(holder: Holder) -> dict[str, Any]:
    return {"held": holder.held, "pid": holder.pid}


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
    where = f"{problem['shard']}/{problem['file']}"
    part = problem["part"]
    if part == "page":
        part = f"page {problem['key'][:16]} of extent {problem['extent']}"
    elif part == "extent":
        part = f"extent {problem['extent']}"
    place = "" if problem["part"] == "file" else f" at {problem['offset']}"
    if place and problem["length"]:
        place += f" ({problem['length']} bytes)"
    return f"{where}: {part}{place} {problem['problem']}"
