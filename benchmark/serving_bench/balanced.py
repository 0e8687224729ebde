"""A disk on which loading a prefix takes about as long as computing it: R = load over prefill.

Which of the two to do, and how much of each, decides most where R is near 1. A perfect server does
both at once from both ends: of P seconds of prefill and L of loading it needs P * L / (P + L), and
the new tokens after that.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving_bench.client import ask_each
from serving_bench.conversations import Conversation, make_conversations
from serving_bench.measures import (
    Outcome,
    Round,
    hits_by_tier,
    mean_ttft,
    reusable_tokens,
    round_quotients,
)
from serving_bench.paced_disk import PacedDisk, achieved_bytes_per_s
from serving_bench.returning import ttft_line
from serving_bench.systems import ENCODED, ONE_END, SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving_bench.bench import Bench
    from serving_bench.client import Sample
    from serving_bench.systems import Fleet


SEED = 7
LOAD_OVER_PREFILL = (0.25, 0.57, 1.0, 2.0)
LEARNING_ROUNDS = 1  # of each R, asked before anything is measured
WANTED = {
    ("stock", 0.25): "<= 0.38",
    ("stock", 0.57): "<= 0.60",
    ("stock", 1.0): "<= 0.72",
    ("stock", 2.0): "<= 0.90",
    ("hicache-file", 0.25): "<= 0.85",
    ("hicache-file", 0.57): "<= 0.75",
    ("hicache-file", 1.0): "<= 0.75",
}


def ideal_s(prefill_s: float, load_s: float, new_s: float) -> float:
    """The first token of a server that computes from the front while it loads from the back."""
    return prefill_s * load_s / (prefill_s + load_s) + new_s


def prefill_s_per_token(full: Sequence[Sample], new: Sequence[Sample]) -> float:
    """What a token of the history takes: the median of how much longer each turn took without it
    than with it on the device. Never 0, however much the machine disturbed the samples."""
    found = statistics.median(
        (whole.ttft_s - part.ttft_s) / reusable_tokens(whole)
        for whole, part in zip(full, new, strict=True)
    )
    return max(found, 1e-7)


def paced_bytes_per_s(load_over_prefill: float, prefill_s: float, token_bytes: int) -> float:
    """The speed at which loading a token takes so many times its prefill."""
    return token_bytes / (load_over_prefill * prefill_s)


@dataclass
class _Part:
    """What was asked at one R, and what the disk of each system really gave."""

    wanted: float
    bytes_per_s: float
    learning: list[Round] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    new: list[Round] = field(default_factory=list)  # stock, history on the device
    achieved: dict[str, float] = field(default_factory=dict)

    @property
    def prefill_s(self) -> float:
        """Of a token, in the minutes of this part."""
        return prefill_s_per_token(
            [sample for one in self.rounds for sample in one["stock"]],
            [sample for one in self.new for sample in one["stock"]],
        )

    def load_over_prefill(self, token_bytes: int) -> dict[str, float]:
        """R as it was, of every system that read anything."""
        prefill_s = self.prefill_s
        return {
            name: token_bytes / speed / prefill_s for name, speed in self.achieved.items() if speed
        }


def run(bench: Bench) -> None:
    names = bench.choose(*SYSTEMS)
    if "stock" not in names:
        bench.report.note("balanced: needs stock among the systems, whose prefill it measures.")
        return
    names += [ONE_END, ENCODED]
    bench.close_main_fleet()
    with bench.workspace.folder("paced") as folder:
        disk = PacedDisk(folder)
        with bench.fleet(names, bench.setting.main, disk.environment) as fleet:
            bench.warm_up(fleet)
            _measure(bench, fleet, names, disk)


def _measure(bench: Bench, fleet: Fleet, names: list[str], disk: PacedDisk) -> None:
    setting = bench.setting
    conversations = make_conversations("balanced", SEED, setting.per_round)
    first: Round = {}
    # Without a limit, to see what a prefill takes; HiCache and the tiers learn a fast disk here.
    before = _Part(wanted=0.0, bytes_per_s=0.0)
    for number, conversation in enumerate(conversations):
        request = conversation.turn(setting.contexts[0], setting.num_output)
        sample = bench.ask_in_turn(fleet, names, request, number, first)
        conversation.answered(request, sample)
    _ask_round(bench, fleet, names, conversations, before, "before")
    prefill_s = before.prefill_s
    parts: list[_Part] = []
    total = len(LOAD_OVER_PREFILL) * (LEARNING_ROUNDS + setting.rounds)
    with bench.steps("balanced", total) as step:
        for wanted in LOAD_OVER_PREFILL:
            speed = paced_bytes_per_s(wanted, prefill_s, bench.kv_bytes_per_token)
            part = _Part(wanted, speed)
            parts.append(part)
            disk.set_speed(speed)
            for number in range(LEARNING_ROUNDS):
                _ask_round(bench, fleet, names, conversations, part, f"{wanted}/learning/{number}")
                step()
            part.learning, part.rounds, part.new = part.rounds, [], []
            starts = {name: len(disk.reads(name)) for name in names}
            for number in range(setting.rounds):
                _ask_round(bench, fleet, names, conversations, part, f"{wanted}/{number}")
                step()
            part.achieved = {
                name: achieved_bytes_per_s(disk.reads(name, starts[name])) for name in names
            }
            prefill_s = part.prefill_s  # the next throttle is set by the latest measurement
    disk.set_speed(0)
    _conclude(bench, conversations, first, before, parts)


def _ask_round(
    bench: Bench,
    fleet: Fleet,
    names: list[str],
    conversations: Sequence[Conversation],
    part: _Part,
    title: str,
) -> None:
    """One return of each conversation from disk on every system, and on stock the same length
    again with its history on the device."""
    setting = bench.setting
    bench.make_cold(list(fleet.systems.values()))
    one: Round = {}
    new: Round = {}
    for place, conversation in enumerate(conversations):
        request, again = (
            conversation.turn(setting.num_new, setting.num_output, f"/{title}/{which}")
            for which in ("return", "again")
        )
        bench.ask_in_turn(fleet, names, request, len(part.rounds) + place, one)
        new.setdefault("stock", []).extend(ask_each(fleet["stock"].url, [again]))
    part.rounds.append(one)
    part.new.append(new)


def _conclude(
    bench: Bench,
    conversations: Sequence[Conversation],
    first: Round,
    before: _Part,
    parts: list[_Part],
) -> None:
    setting = bench.setting
    outcome = Outcome(
        rounds=[one for part in parts for one in part.rounds],
        beside={
            "first": [first],
            "before": [*before.rounds, *before.new],
            "learning": [one for part in parts for one in part.learning],
            "new tokens alone": [one for part in parts for one in part.new],
        },
    )
    tokens = statistics.mean(len(conversation.history) for conversation in conversations)
    measured = {
        f"{part.wanted:g}": part.load_over_prefill(bench.kv_bytes_per_token) for part in parts
    }
    outcome.conditions = (
        f"{len(conversations)} conversations of {tokens:,.0f} tokens return one at a time, device "
        f"and host memory and page cache emptied before each of {setting.rounds} rounds per R "
        f"({LEARNING_ROUNDS} more before them not measured); reads are paced inside the servers, "
        "alike for all, at the speed at which loading a page takes R times its prefill, measured "
        f"just before; {setting.num_new} new tokens."
    )
    is_equal = bench.conclude("balanced", outcome)
    bench.report.raw["balanced"]["parts"] = {
        f"{part.wanted:g}": {
            "bytes_per_s": part.bytes_per_s,
            "achieved_bytes_per_s": part.achieved,
            "prefill_s_per_token": part.prefill_s,
            "load_over_prefill": part.load_over_prefill(bench.kv_bytes_per_token),
        }
        for part in parts
    }
    for wanted, found in measured.items():
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found.items())
        bench.report.note(f"balanced: R = {wanted} as measured: {ratios or 'nothing was read'}.")
    if is_equal:
        for part in parts:
            _report(bench, part)


def _report(bench: Bench, part: _Part) -> None:
    report = bench.report
    prefix = f"balanced_{part.wanted:g}_ttft_over"
    pooled = [sample for one in part.rounds for sample in one["tiered"]]
    fetched = hits_by_tier(pooled)["storage"] / max(sum(map(reusable_tokens, pooled)), 1)
    for peer in [name for name in part.rounds[0] if name != "tiered"]:
        report.add(
            f"{prefix}_{peer.replace('-', '_')}",
            round_quotients(part.rounds, peer, mean_ttft),
            wanted=WANTED.get((peer, part.wanted), ""),
            beside=f"{ttft_line(part.rounds, peer)}; {fetched:.0%} fetched",
        )
    encoded = [mean_ttft(one[ENCODED]) / mean_ttft(one["stock"]) for one in part.rounds]
    report.add(f"balanced_{part.wanted:g}_ttft_encoded_over_stock", encoded)
    speed = part.achieved.get("tiered") or part.bytes_per_s
    ideals = [
        _round_ideal_s(one["stock"], new["stock"], bench.kv_bytes_per_token / speed)
        for one, new in zip(part.rounds, part.new, strict=True)
    ]
    report.add(
        f"{prefix}_ideal",
        [mean_ttft(one["tiered"]) / ideal for one, ideal in zip(part.rounds, ideals, strict=True)],
        beside=f"ideal {statistics.mean(ideals) * 1e3:.0f} ms",
    )


def _round_ideal_s(full: Sequence[Sample], new: Sequence[Sample], load_s: float) -> float:
    """The mean ideal of a round's turns; ``load_s`` is of one token."""
    return statistics.mean(
        ideal_s(
            # A turn that something held up with its history on the device says nothing of prefill.
            max(whole.ttft_s - part.ttft_s, 1e-6),
            load_s * reusable_tokens(whole),
            part.ttft_s,
        )
        for whole, part in zip(full, new, strict=True)
    )
