"""The results of a cluster: tables for people, JSON for programs, a picture."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
from typing import TYPE_CHECKING, Any

from sglang_tiered.flags import format_bytes
from sglang_tiered.tools.machine import describe_machine
from sglang_tiered.tools.terminal import print_lines, print_table
from sglang_tiered_lab.trace.cluster.comparison import ratios
from sglang_tiered_lab.trace.cluster.outcome import TIERS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sglang_tiered_lab.trace.cluster.outcome import Outcome
    from sglang_tiered_lab.trace.cluster.plan import Plan


def describe_fleet(plan: Plan) -> str:
    """Return the members of a plan as ``--fleet`` takes them."""
    counts: dict[str, int] = {}
    for member in plan.members:
        name = member.kind.name if member.role == "both" else f"{member.kind.name}:{member.role}"
        counts[name] = counts.get(name, 0) + 1
    return ",".join(f"{count}:{name}" for name, count in counts.items())


def print_outcomes(
    name: str, found: Sequence[tuple[float, Outcome]], *, wall_s: float, peak_bytes: int
) -> None:
    first = found[0][1]
    plan = first.plan
    print_lines(
        [
            f"{name}: {first.num_requests:,} requests on {describe_fleet(plan)}; goodput is the "
            f"share with a first token within {plan.ttft_s:g} s and {plan.tpot_s * 1000:g} ms a "
            "token after it",
            "",
        ]
    )
    times = ("TTFT mean", "p50", "p90", "p99", "p99.9", "TPOT mean", "p99")
    rows = []
    for load, outcome in found:
        one = outcome.figures()
        keys = ("mean_ttft_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "ttft_p99.9_s")
        rows.append(
            (
                one["policy"],
                f"{load:g}",
                f"{one['speed']:.3g}",
                f"{one['goodput']:.1%}",
                *(_seconds(one[key]) for key in (*keys, "mean_tpot_s", "tpot_p99_s")),
                f"{one['busy']:.0%}",
                f"{one['max_over_mean']:.2f}",
                f"{one['shed']:,} ({one['falsely_shed']:,})" if one["shed"] else "-",
                f"{one['price_per_million_good_tokens']:.2f}",
            )
        )
    header = ("policy", "load", "speed", "goodput", *times, "busy", "max/mean")
    print_table((*header, "shed (falsely)", "$ per Mtok"), rows, left=1)
    print_lines([""])
    rows = []
    for load, outcome in found:
        one = outcome.figures()
        moved = one["link_bytes"]
        rows.append(
            (
                one["policy"],
                f"{load:g}",
                f"{one['hit_rate']:.1%}",
                *(f"{one['hit_share'][tier]:.1%}" for tier in TIERS),
                *(format_bytes(moved[tier]) for tier in (*TIERS[1:], "handoff")),
                f"{one['requests_per_wall_s']:,.0f}",
            )
        )
    moved_names = ("from host", "NVMe", "peers", "bucket", "handed over")
    header = ("prompt tokens", "load", "hit", *TIERS, *moved_names)
    print_table((*header, "requests/s simulated"), rows, left=1)
    for load, outcome in found:
        moves = ", ".join(
            f"{number} {role} at {at_s:,.0f} s" for at_s, number, role in outcome.switches
        )
        if outcome.plan.cooldown_s is not None:
            print_lines(
                ["", f"{outcome.plan.policy} at load {load:g}, roles taken: {moves or '-'}"]
            )
    print_lines(["", f"{wall_s:,.1f} s of wall time; peak memory {format_bytes(peak_bytes)}"])


def _seconds(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds * 1000:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def write_json(
    path: Path,
    found: Sequence[tuple[float, Outcome]],
    *,
    settings: dict[str, Any],
    wall_s: float,
    peak_bytes: int,
) -> None:
    plan = found[0][1].plan
    kinds = {member.kind.name: dataclasses.asdict(member.kind) for member in plan.members}
    report = {
        "machine": describe_machine(),
        "versions": {name: importlib.metadata.version(name) for name in ("sglang-tiered", "numpy")},
        "settings": {**settings, "fleet": describe_fleet(plan), "kinds": kinds},
        "ratios": ratios(found),
        "raw": {
            "wall_s": wall_s,
            "peak_bytes": peak_bytes,
            "runs": [{"load": load, **_plain(outcome.figures())} for load, outcome in found],
        },
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _plain(inside) for key, inside in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw(path: Path, found: Sequence[tuple[float, Outcome]], name: str) -> None:
    """Draw mean TTFT and goodput against load, a line per policy."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for load, outcome in found:
        point = (load, outcome.mean_ttft_s, 100 * outcome.goodput)
        lines.setdefault(outcome.plan.policy, []).append(point)
    for policy, points in lines.items():
        loads, times, shares = zip(*sorted(points), strict=True)
        left.plot(loads, times, marker="o", label=policy)
        right.plot(loads, shares, marker="o", label=policy)
    left.set_ylabel("mean time to first token, s")
    left.set_yscale("log")
    right.set_ylabel("% of requests within both limits")
    for axes in (left, right):
        axes.set_xlabel("load (1: in turn is 80% busy)")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{name}, {describe_fleet(found[0][1].plan)}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
