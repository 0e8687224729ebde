"""The results of a replay: a table for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from typing import TYPE_CHECKING, Any

from sglang_tiered.flags import format_bytes
from sglang_tiered.tools.machine import describe_machine
from sglang_tiered.tools.terminal import print_lines, print_table
from sglang_tiered_lab.trace.replay.totals import TIERS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sglang_tiered_lab.trace.replay.runner import Replay, Run


_REFERENCES = ("lru", "hicache", "belady", "infinite")


def print_runs(plan: Replay, runs: Sequence[Run], *, wall_s: float, peak_bytes: int) -> None:
    survey = plan.stream.survey
    part = f", of which {len(plan.only):,} were simulated" if plan.only is not None else ""
    header = (
        f"{plan.stream.name}: {survey.num_requests:,} requests, {survey.num_tokens:,} tokens in "
        f"{survey.num_units:,} units of {survey.unit_tokens}, {survey.num_unique_units:,} of them "
        f"different, over {survey.duration_s:,.0f} s; {plan.num_servers} "
        f"{'server' if plan.num_servers == 1 else 'servers'}{part}"
    )
    print_lines([header, ""])
    _print_hits(runs)
    _print_bytes(runs)
    _print_times(runs)
    simulated = sum(run.totals.last_s for run in runs)
    simulation_s = max(1e-9, sum(run.wall_s for run in runs))
    num_requests = sum(run.totals.num_requests for run in runs)
    footer = (
        f"{wall_s:,.1f} s of wall time; {num_requests / simulation_s:,.0f} requests and "
        f"{sum(run.totals.num_units for run in runs) / simulation_s:,.0f} units per second, "
        f"{simulated / simulation_s:,.0f} times faster than real time; peak memory "
        f"{format_bytes(peak_bytes)}"
    )
    print_lines([footer])


def _print_hits(runs: Sequence[Run]) -> None:
    rows = []
    header = ("hits", "NVMe", "units", *TIERS, "tokens", "lost", "dropped")
    for run in runs:
        totals = run.totals
        shares = [totals.units_hit[tier] / max(1, totals.num_units) for tier in TIERS]
        lost = totals.units_lost_unspilled + totals.units_lost_unstored
        rows.append(
            (
                run.policy,
                run.sizes.label,
                _percent(totals.hit_rate),
                *map(_percent, shares),
                _percent(totals.token_hit_rate),
                f"{lost:,}",
                f"{sum(totals.units_dropped.values()):,}",
            )
        )
    print_table(header, rows, left=2)
    print_lines([""])


def _print_bytes(runs: Sequence[Run]) -> None:
    columns = ("from host", "from NVMe", "of it unused", "stored", "written", "reinserted")
    rows = []
    header = ("bytes", "NVMe", *columns, "amplification", "loads", "put off", "declined")
    for run in runs:
        totals = run.totals
        sizes = (
            totals.host_bytes_loaded,
            totals.nvme_bytes_loaded,
            totals.nvme_bytes_wasted,
            totals.nvme_bytes_stored,
            totals.nvme_bytes_written,
            totals.nvme_bytes_reinserted,
        )
        rows.append(
            (
                run.policy,
                run.sizes.label,
                *map(format_bytes, sizes),
                f"{totals.write_amplification:.3f}" if totals.write_amplification else "-",
                f"{totals.loads_begun:,}",
                f"{totals.loads_put_off:,}",
                f"{totals.loads_declined:,}+{totals.loads_truncated:,}+{totals.loads_cut_off:,}",
            )
        )
    print_table(header, rows, left=2)
    print_lines([""])
    print_lines(
        [
            "declined + truncated when planned + cut off while loading; lost: units that left "
            "device or host memory without a copy below",
            "",
        ]
    )


def _print_times(runs: Sequence[Run]) -> None:
    columns = ("TTFT mean", "p50", "p90", "p99", "returning mean", "p50", "p90", "p99")
    rows = []
    header = ("modelled time", "NVMe", *columns, "in queue", "prefill", "saved")
    for run in runs:
        totals = run.totals
        times = []
        for distribution in (totals.ttft, totals.ttft_returning):
            summary = distribution.summary()
            times += [_seconds(summary[key]) for key in ("mean_s", "p50_s", "p90_s", "p99_s")]
        rows.append(
            (
                run.policy,
                run.sizes.label,
                *times,
                _seconds(totals.queue_s / max(1, totals.num_requests)),
                f"{totals.prefill_s:,.0f} s",
                f"{totals.prefill_saved_s:,.0f} s",
            )
        )
    print_table(header, rows, left=2)
    print_lines([""])


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def ratios(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Of ``tiered`` over each other policy at the same sizes; over all sizes, one value each."""
    by_size: dict[str, dict[str, Run]] = {}
    for run in runs:
        by_size.setdefault(run.sizes.label, {})[run.policy] = run
    values: dict[str, list[float]] = {}
    for found in by_size.values():
        tiered = found.get("tiered")
        for name in _REFERENCES:
            other = found.get(name)
            if tiered is None or other is None:
                continue
            for what, mine, theirs in (
                ("hit_rate", tiered.totals.hit_rate, other.totals.hit_rate),
                (
                    "returning_ttft",
                    tiered.totals.ttft_returning.mean_s,
                    other.totals.ttft_returning.mean_s,
                ),
            ):
                if theirs:
                    values.setdefault(f"{what}_over_{name}", []).append(mine / theirs)
    return {
        name: {
            "value": sorted(found)[len(found) // 2],
            "min": min(found),
            "max": max(found),
            "n": len(found),
        }
        for name, found in values.items()
    }


def write_json(
    path: Path,
    plan: Replay,
    runs: Sequence[Run],
    *,
    settings: dict[str, Any],
    wall_s: float,
    peak_bytes: int,
) -> None:
    report = {
        "machine": describe_machine(),
        "versions": {name: importlib.metadata.version(name) for name in ("sglang-tiered", "numpy")},
        "settings": {
            **settings,
            "hardware_figures": dataclasses.asdict(plan.hardware),
            "survey": dataclasses.asdict(plan.stream.survey),
        },
        "ratios": ratios(runs),
        "raw": {
            "wall_s": wall_s,
            "peak_bytes": peak_bytes,
            "runs": [_run(run) for run in runs],
        },
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def _run(run: Run) -> dict[str, Any]:
    totals = run.totals
    counts = {
        field.name: getattr(totals, field.name)
        for field in dataclasses.fields(totals)
        if not field.name.startswith("ttft")
    }
    return {
        "policy": run.policy,
        "sizes": dataclasses.asdict(run.sizes),
        "wall_s": run.wall_s,
        "hit_rate": totals.hit_rate,
        "token_hit_rate": totals.token_hit_rate,
        "write_amplification": totals.write_amplification,
        "ttft": totals.ttft.summary(),
        "ttft_returning": totals.ttft_returning.summary(),
        **counts,
    }
