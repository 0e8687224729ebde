"""How much worse than the better of loading and computing was what the policy chose?

Three servers are asked the same: the tiers with their own policy, the same with every load made
(``--tier-load always``), and stock SGLang, which computes everything. The regret of a request is
the first's time to first token over the better of the others'. It is measured when nothing has
changed for a while, right after the disk or the processor became half or twice as fast, after
``kill -9`` and a restart, and when the server has hardly seen a load.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving_bench.balanced import paced_bytes_per_s, prefill_s_per_token
from serving_bench.client import Request, ask_each
from serving_bench.conversations import Conversation, make_conversations, random_tokens
from serving_bench.measures import Outcome, Round, hits_by_tier, mean_ttft, reusable_tokens
from serving_bench.neighbour import busy_cores
from serving_bench.paced_disk import PacedDisk, achieved_bytes_per_s
from serving_bench.systems import ALWAYS, restart
from storage_bench.figures import quotients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving_bench.bench import Bench
    from serving_bench.systems import Fleet


SEED = 10
SYSTEMS = ("stock", ALWAYS, "tiered")
CHANGES = ("disk slower", "disk faster", "processor slower", "processor faster")
NUM_CONVERSATIONS = 4


def regrets(taken: Round) -> list[float]:
    """Request by request: the time of what was chosen over that of the better choice."""
    chosen = [sample.ttft_s for sample in taken["tiered"]]
    better = [
        min(loaded.ttft_s, computed.ttft_s)
        for loaded, computed in zip(taken[ALWAYS], taken["stock"], strict=True)
    ]
    return quotients(chosen, better)


@dataclass
class _Part:
    """What was asked at one R, by phase."""

    wanted: float
    bytes_per_s: float = 0.0
    prefill_s: float = 0.0  # of a token, before anything was loaded
    first: Round = field(default_factory=dict)
    alone: Round = field(default_factory=dict)  # stock, history on the device
    phases: dict[str, Round] = field(default_factory=dict)
    measured: float = 0.0  # R, from what the server that always loads has read while steady


def run(bench: Bench) -> None:
    if missing := {"stock", "tiered"} - set(bench.names):
        bench.report.note(f"regret: needs {', '.join(sorted(missing))} among the systems.")
        return
    bench.close_main_fleet()
    parts: list[_Part] = []
    # Servers and stores are new for each R: a policy that has seen another disk is not one with
    # few observations.
    for wanted in bench.setting.regret_ratios:
        with bench.workspace.folder(f"regret-{wanted:g}") as folder:
            disk = PacedDisk(folder)
            with bench.fleet(SYSTEMS, bench.setting.main, disk.environment) as fleet:
                bench.warm_up(fleet)
                parts.append(_measure(bench, fleet, disk, wanted))
    _conclude(bench, parts)


def _measure(bench: Bench, fleet: Fleet, disk: PacedDisk, wanted: float) -> _Part:
    setting = bench.setting
    part = _Part(wanted)
    conversations = make_conversations(f"regret/{wanted:g}", SEED, NUM_CONVERSATIONS)
    for number, conversation in enumerate(conversations):
        request = conversation.turn(setting.prompt_tokens, setting.num_output)
        sample = bench.ask_in_turn(fleet, SYSTEMS, request, number, part.first)
        conversation.answered(request, sample)
    part.prefill_s = _prefill_s(bench, fleet, conversations, part)
    part.bytes_per_s = paced_bytes_per_s(wanted, part.prefill_s, bench.kv_bytes_per_token)
    disk.set_speed(part.bytes_per_s)

    asker = _Asker(bench, fleet, conversations, part)
    with bench.steps(f"regret {wanted:g}", 3 + len(CHANGES)) as step:
        asker.ask_round("few")
        step()
        start = len(disk.reads(ALWAYS))
        for _ in range(setting.rounds):
            asker.ask_round("steady")
        step()
        speed = achieved_bytes_per_s(disk.reads(ALWAYS, start))
        if speed:
            part.measured = bench.kv_bytes_per_token / speed / part.prefill_s
        asker.ask_after("disk slower", lambda: disk.set_speed(part.bytes_per_s / 2))
        step()
        asker.ask_after("disk faster", lambda: disk.set_speed(part.bytes_per_s))
        step()
        with contextlib.ExitStack() as neighbour:
            # One for every core, each of which the scheduler then shares out in halves.
            cores = busy_cores(os.cpu_count() or 1)
            asker.ask_after("processor slower", lambda: neighbour.enter_context(cores))
            step()
            asker.ask_after("processor faster", neighbour.close)
            step()
        restart(fleet)
        source = random.Random(f"{SEED}/{wanted}")
        warm = Request("warm-up", tuple(random_tokens(source, setting.prompt_tokens)), 2)
        for system in fleet.systems.values():
            ask_each(system.url, [warm])
        asker.ask_round("restart")
        step()
    return part


def _prefill_s(
    bench: Bench, fleet: Fleet, conversations: Sequence[Conversation], part: _Part
) -> float:
    """Of a token on stock: with nothing in memory, and again with the history on the device."""
    setting, stock = bench.setting, fleet["stock"]
    bench.make_cold([stock])
    full: Round = {"stock": []}
    for conversation in conversations:
        for which, into in (("whole", full), ("alone", part.alone)):
            request = conversation.turn(setting.num_new, setting.num_output, f"/{which}")
            into.setdefault("stock", []).extend(ask_each(stock.url, [request]))
    return prefill_s_per_token(full["stock"], part.alone["stock"])


@dataclass
class _Asker:
    """Returns of the same conversations from disk, on all three servers."""

    bench: Bench
    fleet: Fleet
    conversations: Sequence[Conversation]
    part: _Part
    _number: int = 0

    def ask_round(self, phase: str, until_s: float = float("inf")) -> None:
        """Every conversation once, or fewer where that would go past ``until_s``."""
        setting = self.bench.setting
        self.bench.make_cold(list(self.fleet.systems.values()))
        for conversation in self.conversations:
            if time.perf_counter() >= until_s:
                return
            self._number += 1
            request = conversation.turn(
                setting.num_new, setting.num_output, f"/{phase}/{self._number}"
            )
            into = self.part.phases.setdefault(phase, {})
            self.bench.ask_in_turn(self.fleet, self._rotated(), request, 0, into)

    def ask_after(self, phase: str, change: Callable[[], object]) -> None:
        """From a change of speed on, for as long as a policy has to notice it."""
        self.bench.make_cold(list(self.fleet.systems.values()))
        change()
        until_s = time.perf_counter() + self.bench.setting.regret_window_s
        while time.perf_counter() < until_s:
            self.ask_round(phase, until_s)

    def _rotated(self) -> list[str]:
        place = self._number % len(SYSTEMS)
        return [*SYSTEMS[place:], *SYSTEMS[:place]]


def _conclude(bench: Bench, parts: list[_Part]) -> None:
    setting = bench.setting
    outcome = Outcome(
        rounds=[taken for part in parts for taken in part.phases.values()],
        beside={
            "first": [part.first for part in parts],
            "new tokens alone": [part.alone for part in parts],
        },
    )
    outcome.conditions = (
        f"{NUM_CONVERSATIONS} conversations of {setting.prompt_tokens:,} tokens at first return "
        f"one at a time with {setting.num_new} new tokens, device and host memory and page cache "
        "emptied before each four, on servers and stores that are new for each R; few: the first "
        f"four; steady: {setting.rounds} rounds after them; a change lasts "
        f"{setting.regret_window_s:g} s, all of it measured: the disk becomes half as fast, then "
        f"as it was, then {os.cpu_count()} processes want all cores, then not; restart: the first "
        "four after kill -9 and one prompt."
    )
    is_equal = bench.conclude("regret", outcome)
    bench.report.raw["regret"]["parts"] = {
        f"{part.wanted:g}": {
            "bytes_per_s": part.bytes_per_s,
            "prefill_s_per_token": part.prefill_s,
            "load_over_prefill": part.measured,
            "regrets": {phase: regrets(taken) for phase, taken in part.phases.items()},
            "times_s": {
                phase: {name: [sample.ttft_s for sample in taken[name]] for name in SYSTEMS}
                for phase, taken in part.phases.items()
            },
        }
        for part in parts
    }
    bench.report.note(
        "regret: R as measured: "
        + ", ".join(f"{part.wanted:g} was {part.measured:.2f}" for part in parts)
        + "."
    )
    if is_equal:
        for part in parts:
            _report(bench, part)


def _report(bench: Bench, part: _Part) -> None:
    """Means over requests, for a bad choice is not outvoted by many that cost nothing."""
    for suffix, phases, wanted in (
        ("", ("steady",), "<= 1.08"),
        ("_after_change", CHANGES, "<= 1.25"),
        ("_after_restart", ("restart",), ""),
        ("_few", ("few",), ""),
    ):
        found = {phase: regrets(part.phases[phase]) for phase in phases if phase in part.phases}
        values = [value for each in found.values() for value in each]
        if not values:
            continue
        if len(found) > 1:
            beside = ", ".join(f"{phase} {statistics.fmean(x):.2f}" for phase, x in found.items())
        else:
            beside = _times(part.phases[phases[0]])
        bench.report.add(
            f"regret_{part.wanted:g}{suffix}",
            [statistics.fmean(values)],
            wanted=wanted,
            beside=f"{len(values)} requests, {min(values):.2f} to {max(values):.2f}; {beside}",
        )


def _times(taken: Round) -> str:
    chosen = taken["tiered"]
    fetched = hits_by_tier(chosen)["storage"] / max(sum(map(reusable_tokens, chosen)), 1)
    names = (("chosen", "tiered"), ("loaded", ALWAYS), ("computed", "stock"))
    times = " / ".join(f"{title} {mean_ttft(taken[name]) * 1e3:.0f}" for title, name in names)
    return f"{times} ms; {fetched:.0%} fetched"
