"""What a return from NVMe costs over the same return from host memory, warm and after a restart."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving_bench.client import Request, Sample, ask_each
from serving_bench.conversations import Conversation, make_conversations, random_tokens
from serving_bench.measures import Outcome, Round, hits_by_tier, mean_ttft, reusable_tokens
from serving_bench.systems import restart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving_bench.bench import Bench
    from serving_bench.systems import Fleet, System


SEED = 3
AT_ONCE = 8
SINGLES = 3  # conversations of a round that return one at a time
SYSTEMS = ("hicache-file", "tiered")
# Below this share the returns "from host memory" were something else, and say nothing.
MIN_SHARE = 0.9


@dataclass
class _Pairs:
    """Rounds of the same turns, from disk and from host memory."""

    disk: list[Round] = field(default_factory=list)
    host: list[Round] = field(default_factory=list)

    def added_s(self, name: str) -> list[float]:
        """Per round the median of what each turn took longer from disk: one turn that the machine
        held up does not decide."""
        return [
            statistics.median(
                disk.ttft_s - host.ttft_s for disk, host in zip(cold[name], warm[name], strict=True)
            )
            for cold, warm in zip(self.disk, self.host, strict=True)
        ]


def share_from(samples: Sequence[Sample], *tiers: str) -> float:
    """Of the tokens a perfect cache would serve, the part that came from these tiers."""
    usable = sum(map(reusable_tokens, samples))
    hits = hits_by_tier(samples)
    return sum(hits[tier] for tier in tiers) / usable if usable else 0.0


def run(bench: Bench) -> None:
    names = bench.choose(*SYSTEMS)
    if len(names) < len(SYSTEMS):
        bench.report.note("disk_added: needs hicache-file and tiered among the systems.")
        return
    bench.close_main_fleet()
    with bench.fleet(names, bench.setting.disk) as fleet:
        _measure(bench, fleet, names)


def _measure(bench: Bench, fleet: Fleet, names: list[str]) -> None:
    setting = bench.setting
    source = random.Random(SEED)
    number = max(AT_ONCE, setting.rounds * SINGLES)
    conversations = make_conversations("disk_added", SEED, number)
    length = setting.disk_contexts[1]
    num_fillers = math.ceil(1.1 * setting.disk.device_tokens / length)
    fillers = [
        Request(f"disk_added/filler/{index}", tuple(random_tokens(source, length)), 1)
        for index in range(num_fillers)
    ]
    first: Round = {}
    with bench.steps("disk_added, first turns", number + num_fillers) as step:
        for index, conversation in enumerate(conversations):
            size = source.randint(*setting.disk_contexts)
            request = conversation.turn(size, setting.num_output)
            sample = bench.ask_in_turn(fleet, names, request, index, first)
            conversation.answered(request, sample)
            step()
        for index, request in enumerate(fillers):
            bench.ask_in_turn(fleet, names, request, index, first)
            step()

    pairs = {"one": _Pairs(), "many": _Pairs(), "restart": _Pairs()}
    with bench.steps("disk_added", 3 * setting.rounds) as step:
        for index in range(setting.rounds):
            for title, group in (
                ("one", _group(conversations, index, SINGLES)),
                ("many", _group(conversations, index, AT_ONCE)),
            ):
                concurrency = len(group) if title == "many" else 1
                disk, host = _turns(bench, group, f"{title}/{index}")
                for system in fleet.in_turn(names, index):
                    bench.make_cold([system])
                    _return_twice(system, disk, host, fillers, concurrency, pairs[title], index)
                step()
        restart(fleet)
        warm = Request("warm-up", tuple(random_tokens(source, length)), 2)
        for name in names:
            ask_each(fleet[name].url, [warm])
        bench.workspace.settle()
        for index in range(setting.rounds):
            # Each conversation once: what was loaded after the restart is in memory from then on.
            group = conversations[index * SINGLES : (index + 1) * SINGLES]
            disk, host = _turns(bench, group, f"restart/{index}")
            for system in fleet.in_turn(names, index):
                _return_twice(system, disk, host, fillers, 1, pairs["restart"], index)
            step()

    outcome = Outcome(
        rounds=[one for taken in pairs.values() for one in taken.disk],
        beside={
            "first": [first],
            **{f"{title} from host": taken.host for title, taken in pairs.items()},
        },
    )
    outcome.conditions = (
        f"{number} conversations of {setting.disk_contexts[0]:,} to {setting.disk_contexts[1]:,} "
        "tokens; "
        f"device {setting.disk.device_tokens:,} and host {setting.disk.host_tokens:,} tokens; "
        "each return with device and host memory and the page cache emptied before it (after the "
        "restart: empty as it left them), and again once other prompts had pushed it off the "
        f"device; {setting.num_new} new tokens, prefetch policies as by default."
    )
    if bench.conclude("disk_added", outcome):
        _report(bench, pairs)


def _group(conversations: Sequence[Conversation], index: int, size: int) -> list[Conversation]:
    """Another choice in each round, going around."""
    start = index * size
    return [conversations[(start + place) % len(conversations)] for place in range(size)]


def _turns(
    bench: Bench, group: Sequence[Conversation], title: str
) -> tuple[list[Request], list[Request]]:
    """The same turn twice with other new tokens, so that the second finds the history only."""
    setting = bench.setting
    first, second = (
        [
            conversation.turn(setting.num_new, setting.num_output, f"/{title}/{where}")
            for conversation in group
        ]
        for where in ("disk", "host")
    )
    return first, second


def _return_twice(
    system: System,
    disk: Sequence[Request],
    host: Sequence[Request],
    fillers: Sequence[Request],
    concurrency: int,
    pairs: _Pairs,
    index: int,
) -> None:
    for requests, rounds in ((disk, pairs.disk), (host, pairs.host)):
        if rounds is pairs.host:
            ask_each(system.url, fillers)
        while len(rounds) <= index:
            rounds.append({})
        rounds[index][system.name] = ask_each(system.url, requests, concurrency)


def _report(bench: Bench, pairs: dict[str, _Pairs]) -> None:
    report = bench.report
    for title, figure, wanted in (
        ("one", "disk_added_ttft_over_hicache_file", "<= 0.6"),
        ("many", f"disk_added_ttft_{AT_ONCE}_at_once_over_hicache_file", "<= 0.6"),
        ("restart", "restart_added_ttft_over_hicache_file", "<= 0.6"),
    ):
        taken = pairs[title]
        beside = []
        is_sound = True
        for name in SYSTEMS:
            disk = [sample for one in taken.disk for sample in one[name]]
            host = [sample for one in taken.host for sample in one[name]]
            from_disk, from_host = share_from(disk, "storage"), share_from(host, "host", "device")
            beside.append(
                f"{name} {mean_ttft(disk) * 1e3:.0f} ms ({from_disk:.0%} NVMe) - "
                f"{mean_ttft(host) * 1e3:.0f} ms ({from_host:.0%} host)"
            )
            is_sound &= from_host >= MIN_SHARE
        ours, theirs = taken.added_s("tiered"), taken.added_s("hicache-file")
        # Ours may be nothing or, by noise, less; what they are divided by may not.
        if not is_sound or min(theirs) <= 0:
            why = "noise is larger than what it measures" if is_sound else "not from host memory"
            report.note(f"{figure}: no ratio ({why}): {'; '.join(beside)}.")
            continue
        quotients = [a / b for a, b in zip(ours, theirs, strict=True)]
        report.add(figure, quotients, wanted=wanted, beside="; ".join(beside))
