"""Routing policies, on paper: clusters replayed at loads fixed beforehand (``trace replay
--cluster``), for the page ``docs/cluster.md``.

    python benchmark/bench_routing.py --json FOLDER [PART...] [--quick]

Traces are those of Mooncake below ``$SGLANG_TIERED_DATA``, and one that ``trace generate`` makes.
Every part writes a file of its own into the folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from machine import describe_machine, describe_versions
from sglang_tiered.cluster.planner import Fleet, Planner
from sglang_tiered.cluster.published_settings import distserve, splitwise
from sglang_tiered.trace.cluster.books import Knowledge
from sglang_tiered.trace.cluster.comparison import ratios, speed_where_busy
from sglang_tiered.trace.cluster.plan import Member, Plan
from sglang_tiered.trace.cluster.profiles import load_profiles
from sglang_tiered.trace.cluster.routers import Tuning
from sglang_tiered.trace.cluster.simulation import run_cluster
from sglang_tiered.trace.replay.stream import TraceStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang_tiered.trace.cluster.outcome import Outcome
    from sglang_tiered.trace.replay.server import Request

SERVERS = 64
LOADS = (0.5, 0.7, 0.85, 1.0, 1.1, 1.2)
POLICIES = (
    *("in-turn", "hash", "least-load", "least-tokens", "p2c"),
    *("cache-aware", "dynamo", "llm-d", "cost", "oracle"),
)
# By a grid at load 1 on 16 servers, both Mooncake traces: sglang-router's defaults are its best
# or within 4% of that; Dynamo gains up to a weight of 16.
TUNED = Tuning(overlap_weight=16)
GENERATE = "--num-conversations 6000 --rate 4 --system-prompts 40 --system-tokens 2048 --seed 24"
COPIES = {"conversation": 1, "synthetic": 2, "generated": 1}

SOME = ("in-turn", "least-load", "least-tokens", "cache-aware", "dynamo", "llm-d", "cost")

console = Console()
kind = functools.partial(load_profiles().kind, model="llama-3.1-8b")


@functools.cache
def requests_of(name: str, copies: int, limit: int | None = None) -> list[Request]:
    if name != "generated":
        path = Path(os.environ["SGLANG_TIERED_DATA"]) / "mooncake" / f"{name}.jsonl"
        return read(path, copies, limit)
    with tempfile.TemporaryDirectory() as folder:
        whole, path = Path(folder) / "whole.jsonl", Path(folder) / "generated.jsonl"
        trace = [sys.executable, "-m", "sglang_tiered.trace"]
        make = [*trace, "generate", *GENERATE.split(), "--mooncake", str(whole)]
        # New conversations begin for 1,500 s; after that only old ones go on.
        cut = [*trace, "convert", str(whole), "--to-s", "1500", "--output", str(path)]
        for command in (make, cut):
            subprocess.run(command, check=True, capture_output=True)
        return read(path, copies, limit)


def read(path: Path, copies: int, limit: int | None) -> list[Request]:
    stream = TraceStream(path, replicate=copies, spread_s=60.0 if copies > 1 else 0.0, limit=limit)
    return [request for _, request in stream.routed(range(1))]


def make_plan(members: list[Member] | None = None, **more: Any) -> Plan:
    members = members or [Member(kind=kind("h100"))] * SERVERS
    return Plan(members=members, policy="cost", unit_tokens=512, tuning=TUNED, **more)


@functools.cache
def speed_of(name: str, quick: bool) -> float:
    return speed_where_busy(make_plan(), trace(name, quick))


def trace(name: str, quick: bool) -> list[Request]:
    return requests_of(name, 1 if quick else COPIES[name], 2000 if quick else None)


def row(load: float, outcome: Outcome, **more: Any) -> dict[str, Any]:
    one = outcome.figures()
    console.print(
        f"  {one['policy']:12} load {load:<5g} TTFT {one['mean_ttft_s']:8.3f} s "
        f"p99 {one['ttft_p99_s']:7.2f} s good {one['goodput']:.3f} hit {one['hit_rate']:.3f} "
        f"busy {one['busy']:.2f} {one['requests_per_wall_s']:,.0f}/s {more or ''}"
    )
    return {"load": load, **more, **one}


def key_of(label: str) -> str:
    return label.replace("%", "_percent").replace(",", "").replace(" ", "_")


def sweep(
    name: str, plan: Plan, speed: float, quick: bool, policies: Any = POLICIES, loads: Any = LOADS
) -> tuple[list[tuple[float, Outcome]], list[dict[str, Any]]]:
    found, rows = [], []
    for load in loads:
        for policy in policies:
            one = dataclasses.replace(plan, policy=policy, speed=load * speed)
            outcome = run_cluster(one, trace(name, quick))
            found.append((load, outcome))
            rows.append(row(load, outcome))
    return found, rows


def load_part(name: str, quick: bool) -> dict[str, Any]:
    """All policies at all loads."""
    found, rows = sweep(name, make_plan(), speed_of(name, quick), quick)
    return {"ratios": ratios(found), "raw": rows}


def settings_part(quick: bool) -> dict[str, Any]:
    """Load 1 on other tiers and hardware, and with published settings."""
    mixed = [Member(kind=kind(name)) for name in ("h100", "a100") for _ in range(SERVERS // 2)]
    variants: dict[str, tuple[Plan, Any]] = {
        "no peers": (make_plan(tiers=frozenset({"host", "nvme"})), SOME),
        "bucket in the place of peers": (
            make_plan(tiers=frozenset({"host", "nvme", "bucket"})),
            SOME,
        ),
        "device only": (make_plan(tiers=frozenset()), SOME),
        "half H100, half A100": (make_plan(mixed), SOME),
        "published settings": (
            dataclasses.replace(make_plan(), tuning=Tuning()),
            ("dynamo", "cost"),
        ),
    }
    made: dict[str, Any] = {"ratios": {}, "raw": []}
    for label, (plan, policies) in variants.items():
        for name in ("conversation", "synthetic"):
            console.print(f" {label}, {name}")
            speed = (
                speed_of(name, quick)
                if label == "published settings"
                else speed_where_busy(plan, trace(name, quick))
            )
            found, rows = sweep(name, plan, speed, quick, policies, (1.0,))
            key = f"{key_of(label)}_{name}"
            made["ratios"] |= {f"{key}_{what}": one for what, one in ratios(found).items()}
            made["raw"] += [{"setting": label, "trace": name, **one} for one in rows]
    return made


def knowledge_part(quick: bool) -> dict[str, Any]:
    """``cost`` at load 1 with what it knows made worse."""
    variants = {
        "exact": Knowledge(),
        **{f"events {lag:g} s late": Knowledge(lag_s=lag) for lag in (0.5, 2, 5, 30)},
        **{f"{loss:.0%} of events lost": Knowledge(loss=loss) for loss in (0.1, 0.5)},
        "no events": Knowledge(loss=1.0),
        **{f"prices times {factor:g}": Knowledge(price_factor=factor) for factor in (0.5, 2)},
        **{f"price noise {sigma:g}": Knowledge(price_noise=sigma) for sigma in (0.3, 0.7, 1.0)},
        "exact, learning nothing": Knowledge(),
        "price noise 0.7, learning nothing": Knowledge(price_noise=0.7),
        **{f"reports every {late:g} s": Knowledge(report_s=late) for late in (1, 2, 5)},
        "all at once": Knowledge(lag_s=2, loss=0.1, price_noise=0.5, report_s=1),
    }
    made: dict[str, Any] = {"ratios": {}, "raw": []}
    for name in ("conversation", "synthetic"):
        base = 0.0
        for label, knowledge in variants.items():
            plan = dataclasses.replace(
                make_plan(), knowledge=knowledge, speed=speed_of(name, quick)
            )
            if "learning nothing" in label:
                plan = dataclasses.replace(plan, tuning=dataclasses.replace(TUNED, learn=False))
            outcome = run_cluster(plan, trace(name, quick))
            made["raw"].append(row(1.0, outcome, trace=name, knows=label))
            base = base or outcome.mean_ttft_s
            value = outcome.mean_ttft_s / base
            key = f"{name}_{key_of(label)}_ttft_over_exact"
            made["ratios"][key] = {"value": value, "min": value, "max": value, "n": 1}
    return made


def admission_part(quick: bool) -> dict[str, Any]:
    """Goodput at and above saturation, with and without admission."""
    made: dict[str, Any] = {"ratios": {}, "raw": []}
    for name in ("conversation", "synthetic"):
        for load in (1.2, 1.5, 2.0):
            goods = {}
            for policy in ("least-load", "cost"):
                for admission in ("none", "queue", "predicted", "soft"):
                    plan = dataclasses.replace(
                        make_plan(),
                        policy=policy,
                        admission=admission,
                        max_waiting=4,
                        speed=load * speed_of(name, quick),
                    )
                    outcome = run_cluster(plan, trace(name, quick))
                    goods[policy, admission] = outcome.goodput
                    made["raw"].append(row(load, outcome, trace=name, admission=admission))
            for admission in ("predicted", "soft"):
                key = f"{name}_{admission}_goodput_over_none_at_{load:g}"
                value = goods["cost", admission] / goods["cost", "none"]
                made["ratios"][key] = {"value": value, "min": value, "max": value, "n": 1}
    return made


def new_part(quick: bool) -> dict[str, Any]:
    """Nothing repeats: what ``cost`` costs in throughput."""
    requests, unit = [], 0
    for request in trace("conversation", quick):
        units = range(unit, unit + len(request.units))
        unit += len(request.units)
        requests.append(request._replace(units=units, returning=False))
    speed = speed_where_busy(make_plan(), requests)
    made: dict[str, Any] = {"ratios": {}, "raw": []}
    for load in (1.0, 1.2):
        rates = {}
        for policy in ("in-turn", "least-tokens", "cost"):
            plan = dataclasses.replace(make_plan(), policy=policy, speed=load * speed)
            outcome = run_cluster(plan, requests)
            rates[policy] = outcome.tokens_per_s
            made["raw"].append(row(load, outcome, tokens_per_s=outcome.tokens_per_s))
        value = rates["cost"] / rates["in-turn"]
        key = f"new_prompts_throughput_over_in_turn_at_{load:g}"
        made["ratios"][key] = {"value": value, "min": value, "max": value, "n": 1}
    return made


def large_part(quick: bool) -> dict[str, Any]:
    """204,527 requests over 64 servers, in a process of its own: memory and speed."""
    copies = 1 if quick else 17
    requests = requests_of("conversation", copies, None)
    rows = []
    for policy in ("in-turn", "cost"):
        plan = dataclasses.replace(
            make_plan(), policy=policy, speed=speed_of("conversation", quick) / copies
        )
        outcome = run_cluster(plan, requests)
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        rows.append(row(1.0, outcome, peak_bytes=peak_bytes, requests=len(requests)))
        console.print(f"  {len(requests):,} requests, {peak_bytes / 2**30:.2f} GiB")
    return {"ratios": {}, "raw": rows}


def plan_part(quick: bool) -> dict[str, Any]:
    """The planner's split of 64 mixed servers beside the best of all splits."""
    made: dict[str, Any] = {"ratios": {}, "raw": []}
    for name in ("conversation", "synthetic"):
        requests = requests_of(name, 1, 500 if quick else 2000)
        counts = ((kind("h100"), SERVERS // 2), (kind("a100"), SERVERS // 2))
        plan = make_plan(ttft_s=2.0, tpot_s=0.05)
        # At load 1 limits are neither kept nor missed by all.
        fleet = Fleet(counts)
        plan = dataclasses.replace(plan, members=fleet.members(None))
        plan = dataclasses.replace(plan, speed=speed_where_busy(plan, requests))
        planner = Planner(plan, requests, fleet, step=4)
        start = time.perf_counter()
        best = planner.search()
        used, planned_s = len(planner.outcomes), time.perf_counter() - start
        top = planner.search_all()
        goods = [planner.outcomes[split].goodput for split in (best, top)]
        made["raw"].append(
            {
                "trace": name,
                "planned": fleet.describe(best),
                "best": fleet.describe(top),
                "goodput": goods,
                "simulations": [used, len(planner.candidates)],
                "planned_s": planned_s,
                "splits": {
                    fleet.describe(split): outcome.goodput
                    for split, outcome in planner.outcomes.items()
                },
            }
        )
        console.print({key: value for key, value in made["raw"][-1].items() if key != "splits"})
        for key, value in (
            (f"{name}_plan_goodput_over_exhaustive", goods[0] / goods[1]),
            (f"{name}_plan_simulations_over_exhaustive", used / len(planner.candidates)),
        ):
            made["ratios"][key] = {"value": value, "min": value, "max": value, "n": 1}
    return made


def published_part(quick: bool) -> dict[str, Any]:
    """DistServe's and Splitwise's settings beside what they published."""
    count = 200 if quick else 1000
    made: dict[str, Any] = {"ratios": {}, "raw": {}}
    parts: dict[str, Callable[[int], Iterator[Any]]] = {
        "distserve": distserve,
        "splitwise": splitwise,
    }
    for name, rows in parts.items():
        made["raw"][name] = [
            {
                "what": one.what,
                "published": one.published if one.published == one.published else None,
                "modelled": one.modelled,
            }
            for one in rows(count)
        ]
        for one in made["raw"][name]:
            console.print(f"  {one}")
    return made


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "conversation": functools.partial(load_part, "conversation"),
    "synthetic": functools.partial(load_part, "synthetic"),
    "plan": plan_part,
    "knowledge": knowledge_part,
    "new": new_part,
    "admission": admission_part,
    "published": published_part,
    "large": large_part,
    "generated": functools.partial(load_part, "generated"),
    "settings": settings_part,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", metavar="PART", nargs="*", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", metavar="FOLDER", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="a few thousand requests")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))} is no part; choose from {', '.join(PARTS)}")
    if "SGLANG_TIERED_DATA" not in os.environ:
        parser.error("SGLANG_TIERED_DATA must name the folder of the traces")
    for name in options.parts or PARTS:
        console.print(f"{name} ({time.strftime('%H:%M:%S')})")
        start = time.perf_counter()
        report = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {
                "servers": SERVERS,
                "hardware": "h100",
                "model": "llama-3.1-8b",
                "copies": COPIES,
                "generate": GENERATE,
                "tuning": dataclasses.asdict(TUNED),
                "quick": options.quick,
            },
            **PARTS[name](options.quick),
        }
        report["settings"]["wall_s"] = time.perf_counter() - start
        file = options.json / f"routing_{name}_202611.json"
        file.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
