"""Formats what the tools report on stores: ages, holders, findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_tiered.tools.store.holder import Holder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.tools.store.inspection import Problem, RegionView
    from sglang_tiered.tools.store.target import Target

__all__ = [
    "MAX_LISTED",
    "age_text",
    "describe",
    "holder_json",
    "number_text",
    "problem_json",
    "problem_text",
]

MAX_LISTED = 50
"""So many findings of one kind are listed in a table for people; JSON has them all."""


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


def describe(target: Target, holder: Holder, shards: Sequence[dict[str, Any]] = ()) -> list[str]:
    """Return the lines before a table: what DIR is, and who uses it and each shard."""
    if target.is_tier:
        version = "format unknown" if target.manifest is None else f"format {target.manifest}"
        lines = [f"{target.path}: tier directory, {version}, {holder}"]
    else:
        lines = [f"{target.path}: shard directory"]
    for shard in shards:
        checkpoint = _checkpoint_text(shard["checkpoint"])
        lines.append(f"{shard['name']}: {Holder(**shard['lock'])}; {checkpoint}")
    return [*lines, ""]


def _checkpoint_text(checkpoint: dict[str, Any]) -> str:
    if not checkpoint["present"]:
        return "no checkpoint"
    if not checkpoint["valid"]:
        return "its checkpoint does not verify"
    return f"checkpoint of {checkpoint['num_regions']} regions"


def holder_json(holder: Holder) -> dict[str, Any]:
    return {"held": holder.held, "pid": holder.pid}


def problem_json(shard: str, view: RegionView, problem: Problem) -> dict[str, Any]:
    return {
        "shard": shard,
        "region": view.sequence,
        "file": view.name,
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
