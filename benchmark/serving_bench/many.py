"""Sixteen users whose conversations grow, four requests at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving_bench.client import ask_each
from serving_bench.conversations import make_conversations
from serving_bench.measures import Outcome, Round, hit_rate, mean_ttft, round_quotients, throughput
from serving_bench.returning import ttft_line
from serving_bench.systems import SYSTEMS

if TYPE_CHECKING:
    from serving_bench.bench import Bench


SEED = 9
NUM_USERS = 16
NUM_AT_ONCE = 4


def run(bench: Bench) -> None:
    setting, fleet = bench.setting, bench.main_fleet()
    names = bench.choose(*SYSTEMS)
    conversations = make_conversations("many", SEED, NUM_USERS)
    bench.make_cold(list(fleet.systems.values()))
    rounds: list[Round] = []
    outcome = Outcome()
    with (
        bench.counting_bytes(fleet, outcome),
        bench.steps("many", setting.rounds + 1) as step,
    ):
        for number in range(setting.rounds + 1):
            size = setting.num_new if number else setting.prompt_tokens
            requests = [turn.turn(size, setting.num_output) for turn in conversations]
            one: Round = {}
            for system in fleet.in_turn(names, number):
                one[system.name] = ask_each(system.url, requests, NUM_AT_ONCE)
            for place, (conversation, request) in enumerate(
                zip(conversations, requests, strict=True)
            ):
                conversation.answered(request, one[names[0]][place])
            rounds.append(one)
            step()
    outcome.beside = {"first": rounds[:1]}
    outcome.rounds = rounds[1:]
    held = sum(len(conversation.history) for conversation in conversations)
    outcome.new_tokens = held
    outcome.conditions = (
        f"{NUM_USERS} conversations of {setting.prompt_tokens:,} tokens at first, {NUM_AT_ONCE} "
        f"requests at a time, everyone's turn before anyone's next; {setting.num_new} new tokens "
        f"each of {setting.rounds} turns that are measured; at the end {held:,} tokens = "
        f"{held / setting.main.memory_tokens:.1f} times device and host."
    )
    if not bench.conclude("many", outcome):
        return
    rates = ", ".join(f"{name} {hit_rate(outcome.samples(name)):.0%}" for name in names)
    for peer in [name for name in names if name != "tiered"]:
        suffix = peer.replace("-", "_")
        bench.report.add(
            f"many_ttft_over_{suffix}",
            round_quotients(outcome.rounds, peer, mean_ttft),
            wanted="<= 0.9" if peer == "hicache-file" else "",
            beside=f"{ttft_line(outcome.rounds, peer)}; hit rate {rates}",
        )
        bench.report.add(
            f"many_throughput_over_{suffix}", round_quotients(outcome.rounds, peer, throughput)
        )
