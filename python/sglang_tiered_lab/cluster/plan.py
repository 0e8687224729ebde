"""``plan``: how many servers, of what, in which roles, for a trace and its limits."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_tiered.errors import ConfigError
from sglang_tiered.tools.terminal import print_lines, print_table
from sglang_tiered_lab.trace.inputs import add_input_arguments, real

if TYPE_CHECKING:
    from sglang_tiered_lab.cluster.planner import Fleet, Planner
    from sglang_tiered_lab.trace.cluster.outcome import Outcome
    from sglang_tiered_lab.trace.cluster.plan import Plan
    from sglang_tiered_lab.trace.replay.server import Request


TIERS = frozenset({"host", "nvme", "peer"})
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|ms)")
_PRICE = re.compile(r"([a-z0-9.-]+)=([0-9]+(?:\.[0-9]+)?)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser, None)
    parser.add_argument(
        "--fleet",
        metavar="N:KIND,...",
        action="append",
        help="servers to split, such as 32:h100,32:a100; several are compared (8:h100)",
    )
    parser.add_argument("--model", metavar="NAME", default="llama-3.1-8b", help="(%(default)s)")
    parser.add_argument("--profiles", metavar="FILE", type=Path, help="figures of hardware, models")
    parser.add_argument(
        "--price", metavar="KIND=DOLLARS", action="append", default=[], help="of a server's hour"
    )
    parser.add_argument("--ttft", metavar="T", type=duration, default=2.0, help="limit (2s)")
    parser.add_argument("--tpot", metavar="T", type=duration, default=0.05, help="limit (50ms)")
    parser.add_argument("--goal", metavar="P", type=_goal, default=0.9, help="share (0.9)")
    parser.add_argument("--policy", default="cost", help="of routing (%(default)s)")
    parser.add_argument("--step", metavar="N", type=_count, help="between splits (an eighth)")
    parser.add_argument("--exhaustive", action="store_true", help="also simulate every split")
    parser.add_argument("--replicate", metavar="K", type=_count, default=1, help="copies")
    parser.add_argument("--spread", metavar="S", type=real, default=60.0, help=argparse.SUPPRESS)
    parser.add_argument("--stretch", metavar="F", type=real, default=1.0, help="of all times")
    parser.add_argument("--page-tokens", metavar="N", type=_count, help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write all figures there")


def duration(text: str) -> float:
    """Seconds, of ``2s`` or ``50ms``."""
    match = _DURATION.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time above zero, such as 2s or 50ms")
    return float(match[1]) / (1 if match[2] == "s" else 1000)


def _goal(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0, up to 1")
    return value


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 1,000,000")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Plan and print. Returns the exit code; raises ``TieredError`` for what cannot be done."""
    from sglang_tiered_lab.trace.cluster import POLICIES
    from sglang_tiered_lab.trace.cluster.command import read_requests
    from sglang_tiered_lab.trace.cluster.plan import Plan

    if options.policy not in POLICIES:
        raise ConfigError(f"--policy {options.policy} is unknown; one of {', '.join(POLICIES)}.")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json} cannot be written: its folder is missing.")
    prices = _prices(options)
    fleets = [_fleet(text, options, prices) for text in options.fleet or ["8:h100"]]
    known = {kind.name for fleet in fleets for kind, _ in fleet.counts}
    for name in prices.keys() - known:
        raise ConfigError(f"--price {name}: no --fleet has such servers; name one of theirs.")
    name, unit_tokens, requests = read_requests(options)
    plan = Plan(
        members=(),
        policy=options.policy,
        unit_tokens=unit_tokens,
        ttft_s=options.ttft,
        tpot_s=options.tpot,
        tiers=TIERS,
    )
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    print_lines(
        [
            f"{name}: {len(requests):,} requests in {span_s:,.0f} s; goodput is the share with a "
            f"first token within {options.ttft:g} s and {options.tpot * 1000:g} ms a token",
            "",
        ]
    )
    reports = [_one_fleet(options, plan, requests, fleet) for fleet in fleets]
    if options.json is not None:
        report = {"trace": name, "ttft_s": options.ttft, "tpot_s": options.tpot, "plans": reports}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _prices(options: argparse.Namespace) -> dict[str, float]:
    prices = {}
    for price in options.price:
        match = _PRICE.fullmatch(price)
        if match is None:
            raise ConfigError(f"--price {price!r} is none; write h100=4.76, in dollars an hour.")
        prices[match[1]] = float(match[2])
    return prices


def _fleet(text: str, options: argparse.Namespace, prices: dict[str, float]) -> Fleet:
    from sglang_tiered_lab.cluster.planner import Fleet
    from sglang_tiered_lab.trace.cluster.command import fleet
    from sglang_tiered_lab.trace.cluster.profiles import load_profiles

    members = fleet(text, options.model, load_profiles(options.profiles))
    if any(member.role != "both" for member in members):
        raise ConfigError(f"--fleet {text} names roles, which this command chooses; leave them.")
    counts = Fleet.of(members).counts
    return Fleet(
        tuple(
            (dataclasses.replace(kind, price_per_hour=prices[kind.name]), count)
            if kind.name in prices
            else (kind, count)
            for kind, count in counts
        )
    )


def _one_fleet(
    options: argparse.Namespace, plan: Plan, requests: list[Request], fleet: Fleet
) -> dict[str, Any]:
    from sglang_tiered_lab.cluster.planner import Planner, fewest_servers

    start = time.perf_counter()
    planner = Planner(plan, requests, fleet, options.step or max(1, fleet.num_servers // 8))
    best = planner.search()
    num_runs, planned_s = len(planner.outcomes), time.perf_counter() - start
    found = planner.outcomes[best]
    price = sum(kind.price_per_hour * count for kind, count in fleet.counts)
    print_lines(
        [
            f"{fleet.describe(None)}, ${price:,.2f} an hour: {fleet.describe(best)} is best of "
            f"{num_runs} simulated of {len(planner.candidates)} splits, in {planned_s:,.1f} s",
            "",
        ]
    )
    report: dict[str, Any] = {
        "fleet": fleet.describe(None),
        "best": fleet.describe(best),
        "simulated": num_runs,
        "candidates": len(planner.candidates),
        "goodput": found.goodput,
    }
    if options.exhaustive:
        top = planner.outcomes[planner.search_all()]
        report["goodput_over_exhaustive"] = found.goodput / top.goodput if top.goodput else 1.0
        print_lines(
            [
                f"the best of all {len(planner.candidates)} splits keeps both limits for "
                f"{top.goodput:.1%}, this one for {found.goodput:.1%}",
                "",
            ]
        )
    report["splits"] = _print_splits(planner)
    report["tiers"] = _print_tiers(plan, requests, fleet.members(best), found)
    fewest = fewest_servers(plan, requests, fleet, options.goal, 4 * fleet.num_servers)
    if fewest is None:
        line = f"more than {4 * fleet.num_servers} servers are needed for {options.goal:.0%}"
    else:
        smaller = fleet.scaled(fewest[0])
        report["servers_for_goal"] = fewest[0]
        line = f"for {options.goal:.0%}: {fewest[0]} servers, {smaller.describe(fewest[1])}"
    print_lines([line, ""])
    return report


def _figures(outcome: Outcome) -> tuple[tuple[str, ...], dict[str, Any]]:
    one = outcome.figures()
    price = one["price_per_million_good_tokens"]
    cells = (
        f"{one['goodput']:.1%}",
        f"{one['good_requests_per_s']:.2f}",
        f"{one['mean_ttft_s'] * 1000:,.0f} ms",
        f"{one['ttft_p99_s'] * 1000:,.0f} ms",
        f"{one['tpot_p99_s'] * 1000:,.0f} ms",
        f"{one['hit_rate']:.1%}",
        f"{price:.3f}",
    )
    kept = ("goodput", "good_requests_per_s", "mean_ttft_s", "ttft_p99_s", "tpot_p99_s", "hit_rate")
    figures = {key: one[key] for key in kept}
    figures["price_per_million_good_tokens"] = price if math.isfinite(price) else None
    return cells, figures


_COLUMNS = ("goodput", "good/s", "TTFT mean", "p99", "TPOT p99", "hit", "$ per good Mtok")


def _print_splits(planner: Planner) -> list[dict[str, Any]]:
    ranked = sorted(planner.outcomes, key=lambda split: -planner.outcomes[split].goodput)
    made, rows = [], []
    for split in ranked:
        cells, figures = _figures(planner.outcomes[split])
        name = planner.fleet.describe(split)
        rows.append((name, *cells))
        made.append({"split": name, **figures})
    print_table(("split", *_COLUMNS), rows[:12])
    print_lines([""])
    return made


def _print_tiers(
    plan: Plan, requests: list[Request], members: list[Any], found: Outcome
) -> list[dict[str, Any]]:
    from sglang_tiered_lab.trace.cluster.simulation import run_cluster

    rows, made = [], []
    choices = {
        "all": TIERS,
        "and a bucket": TIERS | {"bucket"},
        "without peers": TIERS - {"peer"},
        "without NVMe and peers": TIERS - {"nvme", "peer"},
        "device only": frozenset[str](),
    }
    for name, tiers in choices.items():
        outcome = found
        if tiers != TIERS:
            other = dataclasses.replace(plan, members=members, tiers=frozenset(tiers))
            outcome = run_cluster(other, requests)
        cells, figures = _figures(outcome)
        rows.append((name, *cells))
        made.append({"tiers": name, **figures})
    print_table(("tiers", *_COLUMNS), rows)
    print_lines([""])
    return made
