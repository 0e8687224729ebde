"""Conversations that return: a working set of several times device and host memory."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from serving_bench.client import ask_each
from serving_bench.conversations import make_conversations
from serving_bench.measures import (
    Outcome,
    Round,
    hit_rate,
    mean_ttft,
    round_quotients,
    ttft_percentile,
)
from serving_bench.setting import context_lengths
from serving_bench.systems import SYSTEMS

if TYPE_CHECKING:
    from serving_bench.bench import Bench


SEED = 1


def run(bench: Bench) -> None:
    setting, fleet = bench.setting, bench.main_fleet()
    names = bench.choose(*SYSTEMS)
    source = random.Random(SEED)
    total = setting.main.memory_tokens * setting.working_set
    lengths = context_lengths(source, setting.contexts, total)
    conversations = make_conversations("returning", SEED, len(lengths))
    first: Round = {}
    singles: list[Round] = []
    bursts: list[Round] = []
    outcome = Outcome(beside={"first": [first]})

    with (
        bench.counting_bytes(fleet, outcome),
        bench.steps("returning, first turns", len(lengths)) as step,
    ):
        for number, (conversation, length) in enumerate(zip(conversations, lengths, strict=True)):
            request = conversation.turn(length, setting.num_output)
            sample = bench.ask_in_turn(fleet, names, request, number, first)
            conversation.answered(request, sample)
            outcome.new_tokens += len(conversation.history)
            step()
            if number % 4 == 0:
                bench.note_occupancy(fleet, "returning")
    filled = outcome.moved_bytes

    with bench.steps("returning", setting.rounds * 2) as step:
        for number in range(setting.rounds):
            bench.workspace.settle()
            one: Round = {}
            for place, conversation in enumerate(source.sample(conversations, setting.per_round)):
                request = conversation.turn(setting.num_new, setting.num_output)
                sample = bench.ask_in_turn(fleet, names, request, number + place, one)
                conversation.answered(request, sample)
            singles.append(one)
            step()
            bench.workspace.settle()
            together: Round = {}
            chosen = source.sample(conversations, setting.per_round)
            requests = [turn.turn(setting.num_new, setting.num_output) for turn in chosen]
            for system in fleet.in_turn(names, number):
                together[system.name] = ask_each(system.url, requests, len(requests))
            for place, (conversation, request) in enumerate(zip(chosen, requests, strict=True)):
                conversation.answered(request, together[names[0]][place])
            bursts.append(together)
            bench.note_occupancy(fleet, "returning")
            step()

    outcome.rounds = [*singles, *bursts]
    outcome.moved_bytes = filled
    working_set = sum(len(conversation.history) for conversation in conversations)
    outcome.conditions = (
        f"{len(lengths)} conversations, {working_set:,} tokens = "
        f"{working_set / setting.main.memory_tokens:.1f} times device and host; NVMe cap "
        f"{setting.main.nvme_bytes / working_set / bench.kv_bytes_per_token:.1f} times their KV; "
        f"{setting.num_new} new and {setting.num_output} output tokens per return, one at a time "
        f"and {setting.per_round} at once; page cache emptied before each round; bytes are those "
        "of the first turns."
    )
    if not bench.conclude("returning", outcome):
        return
    _report(bench, singles, bursts)


def _report(bench: Bench, singles: list[Round], bursts: list[Round]) -> None:
    report = bench.report
    both = [
        {name: [*one[name], *together[name]] for name in one}
        for one, together in zip(singles, bursts, strict=True)
    ]
    rates = {name: hit_rate([s for one in both for s in one[name]]) for name in both[0]}
    beside = "hit rate " + ", ".join(f"{name} {rate:.0%}" for name, rate in rates.items())
    for peer in [name for name in both[0] if name != "tiered"]:
        wanted = "<= 0.15" if peer == "stock" else ""
        suffix = peer.replace("-", "_")
        times = ttft_line(singles, peer)
        report.add(
            f"returning_ttft_over_{suffix}",
            round_quotients(singles, peer, mean_ttft),
            wanted=wanted,
            beside=times,
        )
        report.add(
            f"returning_burst_ttft_over_{suffix}",
            round_quotients(bursts, peer, mean_ttft),
            beside=ttft_line(bursts, peer),
        )
    if "stock" in rates:
        pooled = [{name: [s for one in singles for s in one[name]] for name in singles[0]}]
        report.add(
            "returning_ttft_p99_over_stock",
            round_quotients(pooled, "stock", ttft_percentile(0.99)),
            wanted="<= 1",
            beside=f"of {len(pooled[0]['stock'])} returns each",
        )
    if "hicache-file" in rates:
        report.add(
            "hit_rate_over_hicache_file",
            round_quotients(both, "hicache-file", hit_rate),
            wanted="> 1",
            beside=beside,
        )


def ttft_line(rounds: list[Round], peer: str) -> str:
    """Both sides of a ratio in milliseconds, means over all rounds."""
    means = {
        name: mean_ttft([sample for one in rounds for sample in one[name]])
        for name in ("tiered", peer)
    }
    return " / ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in means.items())
