"""Routing policies, on paper: clusters replayed at loads fixed beforehand (``trace replay
--cluster``), for the page ``docs/routing.md``.

    python benchmark/bench_routing.py --json FOLDER [PART...] [--seeds N,...] [--quick]

Traces are those of Mooncake below ``$SGLANG_TIERED_DATA``, and one that ``trace generate`` makes.
Every part writes a file of its own into the folder. A part with seeds keeps what other seeds left
there, so that each call may be short. ``tuning`` comes first: its file holds the settings.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sglang_tiered.tools.machine import describe_machine, describe_versions
from sglang_tiered_lab.cluster.planner import Fleet, Planner
from sglang_tiered_lab.cluster.published_settings import distserve, splitwise
from sglang_tiered_lab.trace.cluster.books import Knowledge
from sglang_tiered_lab.trace.cluster.comparison import speed_where_busy
from sglang_tiered_lab.trace.cluster.plan import Member, Plan
from sglang_tiered_lab.trace.cluster.profiles import load_profiles
from sglang_tiered_lab.trace.cluster.routers import Tuning
from sglang_tiered_lab.trace.cluster.simulation import run_cluster
from sglang_tiered_lab.trace.inputs import Input
from sglang_tiered_lab.trace.replay.stream import TraceStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sglang_tiered_lab.trace.cluster.outcome import Outcome
    from sglang_tiered_lab.trace.replay.server import Request

RESULTS = Path(__file__).resolve().parent / "results"
SEEDS = (0, 1, 2, 3)
TUNING_SEED = 9
LOADS = (0.7, 1.0, 1.2)
PEERS = ("least-load", "least-tokens", "cache-aware", "dynamo", "llm-d")
AT_LOAD_1 = ("in-turn", "hash", "p2c", "oracle")
GENERATE = "--num-conversations 1500 --rate 1 --system-prompts 10 --system-tokens 2048"
MOONCAKE = ("conversation", "synthetic")
COPIES = {"conversation": 1, "synthetic": 2}
TICK_S = {"conversation": 3.0}  # the trace has its times in such steps: ten requests at once

Row = dict[str, Any]
console = Console()
kind = functools.partial(load_profiles().kind, model="llama-3.1-8b")


@dataclass(frozen=True)
class Scale:
    """Servers, and how many requests of a trace they get."""

    servers: int
    requests: int


WIDE, NARROW = Scale(64, 4000), Scale(16, 2500)

PEER = frozenset({"host", "nvme", "peer"})
# Of each kind of cluster: servers of each part of 16, and its tiers.
CLUSTERS: dict[str, tuple[dict[tuple[str, str], int], frozenset[str]]] = {
    "peers": ({("h100", "both"): 16}, PEER),
    "no peers": ({("h100", "both"): 16}, frozenset({"host", "nvme"})),
    "a bucket for peers": ({("h100", "both"): 16}, frozenset({"host", "nvme", "bucket"})),
    "device only": ({("h100", "both"): 16}, frozenset()),
    "half H100, half A100": ({("h100", "both"): 8, ("a100", "both"): 8}, PEER),
    "10 prefill, 6 decode": ({("h100", "prefill"): 10, ("h100", "decode"): 6}, PEER),
}
# A limit of the queue has to be set, so several are tried.
ADMISSIONS = {
    "none": ("none", 1),
    **{f"queue of {most}": ("queue", most) for most in (1, 2, 4, 8)},
    "predicted": ("predicted", 1),
    "soft": ("soft", 1),
}
PUBLISHED = Tuning()
# What is tried of every policy with settings; the first is the published one.
GRID: dict[str, list[dict[str, Any]]] = {
    "cache-aware": [
        {"cache_threshold": share, "balance_abs": most, "balance_rel": times}
        for share, most, times in (
            *((0.3, 64, 1.5), (0.3, 16, 1.2), (0.3, 4, 1.1)),
            *((0.1, 64, 1.5), (0.5, 64, 1.5), (0.7, 4, 1.1)),
        )
    ],
    "dynamo": [
        *({"overlap_weight": weight} for weight in (1.0, 4.0, 16.0, 64.0, 256.0)),
        *({"overlap_weight": weight, "predicted_s": 5.0} for weight in (4.0, 16.0, 64.0)),
        {"overlap_weight": 16.0, "shared_credit": 0.5},
    ],
    "llm-d": [
        {"weights": weights}
        for weights in ((2.0, 1.0, 1.0), (3.0, 2.0, 2.0), (1.0, 1.0, 1.0), (1.0, 1.0, 4.0))
    ],
    "cost": [{"charge": charge} for charge in (1.0, 0.0, 0.5, 2.0)],
}


@functools.cache
def whole_trace(name: str, copies: int) -> list[Request]:
    path = Path(os.environ["SGLANG_TIERED_DATA"]) / "mooncake" / f"{name}.jsonl"
    return read(path, copies)


@functools.cache
def requests_of(name: str, seed: int, scale: Scale) -> list[Request]:
    """Return the window of a trace that belongs to a seed, or what is generated with it. Where the
    trace has times in steps they are drawn within those."""
    if name == "generated":
        return generated(seed)[: scale.requests * 2]
    whole = whole_trace(name, COPIES[name])
    last = max(0, len(whole) - scale.requests)
    begin = int(last * (0.5 if seed == TUNING_SEED else seed) / max(1, len(SEEDS) - 1))
    draw, tick_s = random.Random(seed), TICK_S.get(name, 0.0)
    window = [
        one._replace(arrival_s=one.arrival_s + tick_s * draw.random())
        for one in whole[begin : begin + scale.requests]
    ]
    return sorted(window, key=lambda one: one.arrival_s)


def generated(seed: int) -> list[Request]:
    with tempfile.TemporaryDirectory() as folder:
        whole, path = Path(folder) / "whole.jsonl", Path(folder) / "generated.jsonl"
        trace = [sys.executable, "-m", "sglang_tiered_lab.trace.cli"]
        make = [*trace, "generate", *GENERATE.split(), "--seed", str(24 + seed)]
        # New conversations begin for 1,500 s; after that only old ones go on.
        cut = [*trace, "convert", str(whole), "--to-s", "1500", "--output", str(path)]
        for command in ([*make, "--mooncake", str(whole)], cut):
            subprocess.run(command, check=True, capture_output=True)
        return read(path, 1)


def read(path: Path, copies: int) -> list[Request]:
    stream = TraceStream(Input(path), replicate=copies, spread_s=60.0 if copies > 1 else 0.0)
    return [request for _, request in stream.routed(range(1))]


@functools.cache
def tuned(cluster: str) -> Tuning:
    """Return the settings that ``tuning`` found for a kind of cluster."""
    file = RESULTS / "routing_tuning_202611.json"
    if not file.exists():
        raise SystemExit(f"{file.name} is missing; run the part tuning first")
    best = json.loads(file.read_text())["raw"]["best"][cluster]
    settings = {key: value for one in best.values() for key, value in one.items()}
    settings["weights"] = tuple(settings["weights"])
    return Tuning(**settings)


def make_plan(cluster: str = "peers", scale: Scale = WIDE, **more: Any) -> Plan:
    parts, tiers = CLUSTERS[cluster]
    members = [
        Member(kind=kind(name), role=role)
        for (name, role), count in parts.items()
        for _ in range(count * scale.servers // 16)
    ]
    settings = {"tiers": tiers, "tuning": PUBLISHED, **more}
    return Plan(members=members, policy="cost", unit_tokens=512, **settings)


@functools.cache
def speed_of(name: str, seed: int, scale: Scale, cluster: str = "peers") -> float:
    """Return the speed of load 1."""
    return speed_where_busy(make_plan(cluster, scale), requests_of(name, seed, scale))


def row(load: float, outcome: Outcome, **more: Any) -> Row:
    one = outcome.figures()
    console.print(
        f"  {one['policy']:12} load {load:<5g} TTFT {one['mean_ttft_s']:8.3f} s "
        f"p99 {one['ttft_p99_s']:7.2f} s good {one['goodput']:.3f} hit {one['hit_rate']:.3f} "
        f"busy {one['busy']:.2f} {one['requests_per_wall_s']:,.0f}/s {more or ''}"
    )
    return {"load": load, **more, **one}


def key_of(label: str) -> str:
    return label.replace("%", "_percent").replace(",", "").replace(" ", "_")


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return the median of the seeds, the least and the most."""
    found = sorted(values)
    return {
        "value": statistics.median(found),
        "min": found[0],
        "max": found[-1],
        "n": len(found),
    }


def quotients(
    rows: list[Row], of: Callable[[Row], Any], over: Any, figure: str, *same: str
) -> dict[str, dict[str, float]]:
    """Return the spread of a figure over that of the row with ``of(row) == over``, of the same seed
    and with the same values of ``same``; by a name of ``of`` and those values."""
    base = {
        (one["seed"], *(one[key] for key in same)): one[figure] for one in rows if of(one) == over
    }
    found = collections.defaultdict(list)
    for one in rows:
        place = tuple(one[key] for key in same)
        if of(one) != over and (one["seed"], *place) in base:
            found[place, of(one)].append((one[figure], base[one["seed"], *place]))
    made = {}
    for (place, label), pairs in found.items():
        parts = [f"{part:g}" if isinstance(part, float) else part for part in (label, *place)]
        made["_".join(map(key_of, parts))] = spread(a / b for a, b in pairs)
    return made


def over_peers(rows: list[Row], *same: str) -> dict[str, dict[str, float]]:
    """Return mean TTFT of ``cost`` over that of each other policy."""
    inverse = quotients(
        [{**one, "rate": 1 / one["mean_ttft_s"]} for one in rows],
        lambda one: one["policy"],
        "cost",
        "rate",
        *same,
    )
    return {f"cost_over_{name}": one for name, one in inverse.items()}


# ---- Parts with seeds: rows of one seed, and the ratios of all rows ----


def load_rows(name: str, scale: Scale, seed: int) -> Iterator[Row]:
    """The contenders at all loads, the rest at load 1."""
    speed, requests = speed_of(name, seed, scale), requests_of(name, seed, scale)
    plan = make_plan(scale=scale, tuning=tuned("peers"), seed=seed)
    for load in LOADS:
        for policy in (*PEERS, "cost", *(AT_LOAD_1 if load == 1 else ())):
            one = dataclasses.replace(plan, policy=policy, speed=load * speed)
            yield row(load, run_cluster(one, requests), seed=seed)


def load_ratios(rows: list[Row]) -> dict[str, Any]:
    return over_peers(rows, "load")


def settings_rows(seed: int) -> Iterator[Row]:
    """Load 1 on other tiers and hardware, and with published settings."""
    for cluster, name in itertools.product(CLUSTERS, MOONCAKE):
        speed = speed_of(name, seed, NARROW, cluster)
        for label, tuning in ((cluster, tuned(cluster)), ("published settings", PUBLISHED)):
            if cluster not in (label, "peers"):
                continue
            for policy in (*PEERS, "cost"):
                plan = make_plan(cluster, NARROW, tuning=tuning, seed=seed, speed=speed)
                plan = dataclasses.replace(plan, policy=policy)
                outcome = run_cluster(plan, requests_of(name, seed, NARROW))
                yield row(1.0, outcome, seed=seed, setting=label, trace=name)


def settings_ratios(rows: list[Row]) -> dict[str, Any]:
    return over_peers(rows, "setting", "trace")


def knowledge_rows(seed: int) -> Iterator[Row]:
    """``cost`` at load 1 with what it knows made worse."""
    noisy = Knowledge(price_noise=0.7)
    variants = {
        "exact": Knowledge(),
        **{f"events {lag:g} s late": Knowledge(lag_s=lag) for lag in (2, 30)},
        **{f"{loss:.0%} of events lost": Knowledge(loss=loss) for loss in (0.1, 0.5)},
        "no events": Knowledge(loss=1.0),
        **{f"prices times {factor:g}": Knowledge(price_factor=factor) for factor in (0.5, 2)},
        **{f"price noise {sigma:g}": Knowledge(price_noise=sigma) for sigma in (0.3, 0.7)},
        "price noise 0.7, learning nothing": noisy,
        **{
            f"price noise {sigma:g}, servers too": Knowledge(
                price_noise=sigma, misleads_servers=True
            )
            for sigma in (0.3, 0.7)
        },
        "prices times 2, servers too": Knowledge(price_factor=2, misleads_servers=True),
        **{f"reports every {late:g} s": Knowledge(report_s=late) for late in (1, 2, 5)},
        "all at once": Knowledge(
            lag_s=2, loss=0.1, price_noise=0.5, misleads_servers=True, report_s=1
        ),
    }
    for name in MOONCAKE:
        plan = make_plan(scale=NARROW, tuning=tuned("peers"), seed=seed)
        plan = dataclasses.replace(plan, speed=speed_of(name, seed, NARROW))
        for label, knowledge in variants.items():
            tuning = dataclasses.replace(plan.tuning, learn="learning nothing" not in label)
            one = dataclasses.replace(plan, knowledge=knowledge, tuning=tuning)
            outcome = run_cluster(one, requests_of(name, seed, NARROW))
            yield row(1.0, outcome, seed=seed, trace=name, knows=label)


def knowledge_ratios(rows: list[Row]) -> dict[str, Any]:
    return quotients(rows, lambda one: one["knows"], "exact", "mean_ttft_s", "trace")


def admission_rows(seed: int) -> Iterator[Row]:
    """Goodput above saturation, with and without admission."""
    for name, load in itertools.product(MOONCAKE, (1.2, 1.5, 2.0)):
        plan = make_plan(scale=NARROW, tuning=tuned("peers"), seed=seed)
        plan = dataclasses.replace(plan, speed=load * speed_of(name, seed, NARROW))
        for label, (admission, waiting) in ADMISSIONS.items():
            one = dataclasses.replace(plan, admission=admission, max_waiting=waiting)
            outcome = run_cluster(one, requests_of(name, seed, NARROW))
            yield row(load, outcome, seed=seed, trace=name, admission=label)


def admission_ratios(rows: list[Row]) -> dict[str, Any]:
    return quotients(rows, lambda one: one["admission"], "none", "goodput", "trace", "load")


def new_rows(seed: int) -> Iterator[Row]:
    """Nothing repeats: what ``cost`` costs in throughput."""
    requests, unit = [], 0
    for request in requests_of("conversation", seed, NARROW):
        units = range(unit, unit + len(request.units))
        unit += len(request.units)
        requests.append(request._replace(units=units, returning=False))
    plan = make_plan(scale=NARROW, tuning=tuned("peers"), seed=seed)
    speed = speed_where_busy(plan, requests)
    for load, policy in itertools.product((1.0, 1.2), ("in-turn", "least-tokens", "cost")):
        one = dataclasses.replace(plan, policy=policy, speed=load * speed)
        yield row(load, run_cluster(one, requests), seed=seed)


def new_ratios(rows: list[Row]) -> dict[str, Any]:
    return {
        f"throughput_{name}_over_{base}": one
        for base in ("in-turn", "least-tokens")
        for name, one in quotients(
            rows, lambda one: one["policy"], base, "tokens_per_s", "load"
        ).items()
        if name.startswith("cost")
    }


SEEDED: dict[str, tuple[Callable[[int], Iterator[Row]], Callable[[list[Row]], dict[str, Any]]]] = {
    "conversation": (functools.partial(load_rows, "conversation", WIDE), load_ratios),
    "synthetic": (functools.partial(load_rows, "synthetic", WIDE), load_ratios),
    "generated": (functools.partial(load_rows, "generated", NARROW), load_ratios),
    "settings": (settings_rows, settings_ratios),
    "knowledge": (knowledge_rows, knowledge_ratios),
    "admission": (admission_rows, admission_ratios),
    "new": (new_rows, new_ratios),
}

# ---- Parts that run once ----


def tuning_part(quick: bool) -> dict[str, Any]:
    """The settings of every policy that has some, by one rule: those with the least mean TTFT at
    load 1, in logarithms, over both Mooncake traces; of each kind of cluster on its own."""
    raw: dict[str, Any] = {"best": {}, "tried": []}
    for cluster in CLUSTERS:
        best: dict[str, Any] = {}
        for policy, settings in GRID.items():
            scores = []
            for one in settings:
                times = []
                for name in MOONCAKE[: 1 if quick else None]:
                    plan = make_plan(cluster, NARROW, tuning=Tuning(**one), seed=TUNING_SEED)
                    speed = speed_of(name, TUNING_SEED, NARROW, cluster)
                    plan = dataclasses.replace(plan, policy=policy, speed=speed)
                    outcome = run_cluster(plan, requests_of(name, TUNING_SEED, NARROW))
                    times.append(outcome.mean_ttft_s)
                score = math.exp(statistics.mean(map(math.log, times)))
                scores.append(score)
                tried = {"cluster": cluster, "policy": policy, "settings": one, "ttft_s": times}
                raw["tried"].append({**tried, "score_s": score})
                console.print(f"  {tried} {score:.3f}")
            best[policy] = settings[scores.index(min(scores))]
        raw["best"][cluster] = best
    return {"ratios": {}, "raw": raw}


def large_part(quick: bool) -> dict[str, Any]:
    """204,527 requests over 64 servers, in a process of its own: memory and speed."""
    copies = 1 if quick else 17
    requests = whole_trace("conversation", copies)
    speed = speed_of("conversation", 0, WIDE) / copies
    rows = []
    for policy in ("in-turn", "cost"):
        plan = make_plan(tuning=tuned("peers"), speed=speed)
        outcome = run_cluster(dataclasses.replace(plan, policy=policy), requests)
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        rows.append(row(1.0, outcome, peak_bytes=peak_bytes, requests=len(requests)))
        console.print(f"  {len(requests):,} requests, {peak_bytes / 2**30:.2f} GiB")
    return {"ratios": {}, "raw": rows}


def plan_part(quick: bool) -> dict[str, Any]:
    """The planner's split of 64 mixed servers beside the best of all splits."""
    made: dict[str, Any] = {"ratios": {}, "raw": []}
    for name in ("conversation", "synthetic"):
        requests = requests_of(name, 0, Scale(64, 500 if quick else 2000))
        counts = ((kind("h100"), 32), (kind("a100"), 32))
        plan = make_plan(tuning=tuned("half H100, half A100"), ttft_s=2.0, tpot_s=0.05)
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
    "tuning": tuning_part,
    "plan": plan_part,
    "published": published_part,
    "large": large_part,
}


def seeded(name: str, seeds: list[int], file: Path) -> dict[str, Any]:
    """Run a part with these seeds; rows of others stay."""
    known = json.loads(file.read_text()) if file.exists() else {}
    rows = [one for one in known.get("raw", []) if one.get("seed", seeds[0]) not in seeds]
    run, ratios = SEEDED[name]
    for seed in seeds:
        rows += run(seed)
    return {"ratios": ratios(rows), "raw": rows}


def main() -> int:
    names = (*PARTS, *SEEDED)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", metavar="PART", nargs="*", help=f"of {', '.join(names)}")
    parser.add_argument("--json", metavar="FOLDER", type=Path, required=True)
    parser.add_argument("--seeds", metavar="N,...", default=",".join(map(str, SEEDS)))
    parser.add_argument("--quick", action="store_true", help="less of the parts without seeds")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(names):
        parser.error(f"{', '.join(sorted(unknown))} is no part; choose from {', '.join(names)}")
    if "SGLANG_TIERED_DATA" not in os.environ:
        parser.error("SGLANG_TIERED_DATA must name the folder of the traces")
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if not set(seeds) <= set(SEEDS):
        parser.error(f"--seeds {options.seeds}: they are of {', '.join(map(str, SEEDS))}")
    for name in options.parts or names:
        console.print(f"{name} ({time.strftime('%H:%M:%S')})")
        start = time.perf_counter()
        file = options.json / f"routing_{name}_202611.json"
        made = seeded(name, seeds, file) if name in SEEDED else PARTS[name](options.quick)
        settings = {
            "model": "llama-3.1-8b",
            "wide": dataclasses.asdict(WIDE),
            "narrow": dataclasses.asdict(NARROW),
            "copies": COPIES,
            "generate": GENERATE,
            "quick": options.quick,
            "wall_s": time.perf_counter() - start,
        }
        report = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": settings,
            **made,
        }
        file.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
