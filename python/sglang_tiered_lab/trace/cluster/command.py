"""``trace replay --cluster``: its flags, and what they make happen."""

from __future__ import annotations

import argparse
import dataclasses
import re
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_tiered.errors import ConfigError
from sglang_tiered_lab.trace.cluster import ADMISSIONS, POLICIES
from sglang_tiered_lab.trace.inputs import Input

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered_lab.trace.cluster.plan import Change, Member, Plan
    from sglang_tiered_lab.trace.cluster.profiles import Profiles
    from sglang_tiered_lab.trace.replay.server import Request


MAX_SERVERS = 4096
MAX_NOISE = 10
"""Of lognormal noise: a price is then wrong by more than 20,000 times on average."""
_MEMBERS = re.compile(r"([1-9][0-9]{0,3}):([a-z0-9.-]+?)(?::(both|prefill|decode))?")
_CHANGE = re.compile(r"([0-9]+(?:\.[0-9]+)?):(die|drain|join):([0-9]{1,4})")
TIERS = ("host", "nvme", "peer", "bucket")


def add_arguments(parser: argparse.ArgumentParser, real: Callable[[str], float]) -> None:
    """Add the flags; ``real`` reads a number of zero or more."""
    what = parser.add_argument_group("a cluster")
    what.add_argument(
        "--cluster",
        action="store_true",
        help=f"one clock over all servers; --policy is then of {', '.join(POLICIES)}",
    )
    what.add_argument(
        "--fleet",
        metavar="N:KIND[:ROLE],...",
        help="servers, such as 48:h100:prefill,16:4xa100:decode (default: --servers of h100)",
    )
    what.add_argument("--model", metavar="NAME", default="llama-3.1-8b", help="(%(default)s)")
    what.add_argument("--profiles", metavar="FILE", type=Path, help="figures of hardware, models")
    what.add_argument(
        "--loads",
        metavar="F,...",
        help="multiples of the load at which in-turn is 80%% busy (default: as --stretch says)",
    )
    what.add_argument("--tiers", metavar="NAME,...", default="host,nvme,peer", help="(%(default)s)")
    what.add_argument("--ttft", metavar="S", type=real, default=2.0, help="limit (%(default)s)")
    what.add_argument("--tpot", metavar="S", type=real, default=0.1, help="limit (%(default)s)")
    what.add_argument("--admission", choices=ADMISSIONS, default="none", help="(%(default)s)")
    what.add_argument(
        "--max-waiting", metavar="N", type=int, default=16, help="per server, for queue (16)"
    )
    what.add_argument(
        "--classes", metavar="SHARE,...", default="1", help="the first is never shed (1)"
    )
    what.add_argument(
        "--change", metavar="S:WHAT:SERVER,...", default="", help="die, drain or join at S seconds"
    )
    what.add_argument(
        "--balance",
        metavar="S",
        type=real,
        help="roles follow the load, S seconds between switches",
    )
    what.add_argument("--seed", metavar="N", type=int, default=0)
    knows = parser.add_argument_group("what the router knows")
    knows.add_argument("--lag", metavar="S", type=real, default=0.0, help="of events")
    knows.add_argument("--loss", metavar="P", type=share, default=0.0, help="of events")
    knows.add_argument("--report", metavar="S", type=real, default=0.25, help="between reports")
    knows.add_argument("--price-factor", metavar="F", type=real, default=1.0)
    knows.add_argument("--price-noise", metavar="SIGMA", type=real, default=0.0)
    knows.add_argument(
        "--wrong-plans", action="store_true", help="servers plan with the wrong prices too"
    )
    tuned = parser.add_argument_group("settings of policies (default: as published)")
    tuned.add_argument("--cache-threshold", metavar="P", type=share, default=0.3)
    tuned.add_argument("--balance-abs", metavar="N", type=int, default=64)
    tuned.add_argument("--balance-rel", metavar="F", type=real, default=1.5)
    tuned.add_argument("--overlap-weight", metavar="W", type=real, default=1.0)
    tuned.add_argument("--temperature", metavar="T", type=real, default=0.0)
    tuned.add_argument("--shared-credit", metavar="P", type=share, default=0.0)
    tuned.add_argument("--predicted", metavar="S", type=real, default=0.0)
    tuned.add_argument("--weights", metavar="PREFIX,FREE,QUEUE", default="2,1,1", help="(2,1,1)")
    tuned.add_argument("--charge", metavar="F", type=real, default=1.0, help="of work, for cost")


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return value


def run(options: argparse.Namespace) -> int:
    """Replay and print. Returns the exit code; raises ``TieredError`` for what cannot be done."""
    from sglang_tiered_lab.trace.cluster import report
    from sglang_tiered_lab.trace.replay import plot

    for path in (options.json, options.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} cannot be written: {path.absolute().parent} is no folder.")
    if options.plot is not None:
        plot.require(options.plot)
    policies = _policies(options.policy)
    loads = _numbers("--loads", options.loads) if options.loads else []
    plan = _plan(options)
    name, unit_tokens, requests = read_requests(options)
    plan = dataclasses.replace(plan, unit_tokens=unit_tokens)
    start = time.perf_counter()
    found = simulate(options, plan, requests, policies, loads)
    wall_s = time.perf_counter() - start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report.print_outcomes(name, found, wall_s=wall_s, peak_bytes=peak_bytes)
    if options.json is not None:
        settings = {key: _plain(value) for key, value in vars(options).items()}
        settings = {key: value for key, value in settings.items() if value is not None}
        settings["trace"] = name
        report.write_json(
            options.json, found, settings=settings, wall_s=wall_s, peak_bytes=peak_bytes
        )
    if options.plot is not None:
        report.draw(options.plot, found, name)
    return 0


def simulate(
    options: argparse.Namespace,
    plan: Plan,
    requests: list[Request],
    policies: list[str],
    loads: list[float],
) -> list[Any]:
    """Run a comparison, with a bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    from sglang_tiered_lab.trace.cluster.comparison import Comparison

    compared = Comparison(plan=plan, requests=requests, policies=policies, loads=loads)
    console = Console(stderr=True)
    shown = console.is_terminal if options.progress is None else options.progress
    with Progress(console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task("runs", total=compared.num_runs)
        return list(compared.run(lambda count: progress.advance(task, count)))


def read_requests(options: argparse.Namespace) -> tuple[str, int, list[Request]]:
    """Return the name of the trace, the tokens of its blocks, and all its requests."""
    from sglang_tiered_lab.trace.replay.stream import TraceStream

    stream = TraceStream(
        Input.of(options),
        page_tokens=options.page_tokens,
        stretch=options.stretch,
        replicate=options.replicate,
        spread_s=options.spread if options.replicate > 1 else 0.0,
    )
    requests = [request for _, request in stream.routed(range(1))]
    return stream.name, stream.survey.unit_tokens, requests


def _plan(options: argparse.Namespace) -> Plan:
    from sglang_tiered_lab.trace.cluster.books import Knowledge
    from sglang_tiered_lab.trace.cluster.plan import Plan
    from sglang_tiered_lab.trace.cluster.profiles import load_profiles
    from sglang_tiered_lab.trace.cluster.routers import Tuning

    members = fleet(
        options.fleet or f"{options.servers}:h100", options.model, load_profiles(options.profiles)
    )
    tiers = [name for name in options.tiers.split(",") if name]
    for name in tiers:
        if name not in TIERS:
            raise ConfigError(f"--tiers {name} is unknown; choose from {', '.join(TIERS)}.")
    if options.ttft <= 0 or options.tpot <= 0:
        raise ConfigError("--ttft and --tpot must be greater than zero.")
    weights = _numbers("--weights", options.weights)
    if len(weights) != 3:
        raise ConfigError(f"--weights {options.weights} must be three numbers, such as 2,1,1.")
    if options.report <= 0:
        raise ConfigError("--report must be greater than zero.")
    if options.price_factor <= 0 or options.max_waiting < 1:
        raise ConfigError("--price-factor and --max-waiting must be greater than zero.")
    if options.price_noise > MAX_NOISE:
        raise ConfigError(f"--price-noise {options.price_noise:g} is more than {MAX_NOISE}.")
    if options.balance is not None and (not options.balance or members[0].role == "both"):
        raise ConfigError("--balance wants seconds above zero, and a --fleet of both roles.")
    return Plan(
        members=members,
        policy="in-turn",
        unit_tokens=1,
        ttft_s=options.ttft,
        tpot_s=options.tpot,
        admission=options.admission,
        max_waiting=options.max_waiting,
        classes=_numbers("--classes", options.classes),
        tiers=frozenset(tiers),
        knowledge=Knowledge(
            lag_s=options.lag,
            loss=options.loss,
            report_s=options.report,
            price_factor=options.price_factor,
            price_noise=options.price_noise,
            misleads_servers=options.wrong_plans,
        ),
        tuning=Tuning(
            cache_threshold=options.cache_threshold,
            balance_abs=options.balance_abs,
            balance_rel=options.balance_rel,
            overlap_weight=options.overlap_weight,
            temperature=options.temperature,
            shared_credit=options.shared_credit,
            predicted_s=options.predicted,
            weights=(weights[0], weights[1], weights[2]),
            charge=options.charge,
        ),
        changes=_changes(options.change, len(members)),
        cooldown_s=options.balance,
        seed=options.seed,
    )


def fleet(text: str, model: str, profiles: Profiles) -> list[Member]:
    """Return the servers of ``48:h100:prefill,16:a100:decode``. Raises ``ConfigError``."""
    from sglang_tiered_lab.trace.cluster.plan import Member

    members: list[Member] = []
    for part in text.split(","):
        match = _MEMBERS.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"--fleet {part!r} is no group of servers; write 64:h100 or 16:h100:decode."
            )
        one = Member(kind=profiles.kind(match[2], model), role=match[3] or "both")
        members += [one] * int(match[1])
    if len(members) > MAX_SERVERS:
        raise ConfigError(f"--fleet {text} are {len(members):,} servers; at most {MAX_SERVERS:,}.")
    roles = {member.role for member in members}
    if len(roles & {"prefill", "decode"}) == 1:
        raise ConfigError(f"--fleet {text} needs servers of both roles, prefill and decode.")
    if len(roles) > 2:
        raise ConfigError(f"--fleet {text} mixes servers that do both with the other roles.")
    return members


def _changes(text: str, count: int) -> list[Change]:
    from sglang_tiered_lab.trace.cluster.plan import Change

    changes = []
    for part in filter(None, text.split(",")):
        match = _CHANGE.fullmatch(part.strip())
        if match is None or int(match[3]) >= count:
            raise ConfigError(
                f"--change {part!r} is none; write 60:die:3 for server 3 of 0 to {count - 1}."
            )
        changes.append(Change(at_s=float(match[1]), what=match[2], server=int(match[3])))
    return changes


def _policies(text: str | None) -> list[str]:
    names = [name.strip() for name in (text or ",".join(POLICIES)).split(",") if name.strip()]
    for name in names:
        if name not in POLICIES:
            raise ConfigError(
                f"--policy {name} is unknown to --cluster; choose from {', '.join(POLICIES)}."
            )
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--policy {text!r} must name each policy once.")
    return names


def _numbers(flag: str, text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value <= 1e6 for value in values):  # nor is NaN
        raise ConfigError(f"{flag} {text!r} is not a list of numbers above zero, such as 0.5,1.")
    return values


def _plain(value: object) -> str | int | float | None:
    if value is None or isinstance(value, (str, int, float)):
        return value
    return value.name if isinstance(value, Path) else None
