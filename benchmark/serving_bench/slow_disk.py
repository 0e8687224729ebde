"""A disk so slow that a fetch costs more than the prefill it saves."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from serving_bench.conversations import make_conversations
from serving_bench.measures import (
    Outcome,
    Round,
    hits_by_tier,
    mean_ttft,
    round_quotients,
)
from serving_bench.returning import ttft_line
from serving_bench.throttle import find_throttle, process_tree

if TYPE_CHECKING:
    from serving_bench.bench import Bench


SEED = 4
SYSTEMS = ("stock", "hicache-file", "tiered")
FETCH_OVER_PREFILL = 3.0
LEARNING_ROUNDS = 1  # asked under the limit before anything is measured


def run(bench: Bench) -> None:
    setting, fleet = bench.setting, bench.main_fleet()
    names = bench.choose(*SYSTEMS)
    throttle = find_throttle(bench.workspace.root)
    conversations = make_conversations("slow_disk", SEED, setting.per_round)
    first: Round = {}
    rounds: list[Round] = []
    outcome = Outcome(beside={"first": [first]})
    for number, conversation in enumerate(conversations):
        request = conversation.turn(setting.prompt_tokens, setting.num_output)
        sample = bench.ask_in_turn(fleet, names, request, number, first)
        conversation.answered(request, sample)

    reference = first.get("stock", first["tiered"])
    prefill_s = statistics.median(sample.ttft_s / sample.num_prompt for sample in reference)
    bytes_per_s = int(bench.kv_bytes_per_token / (FETCH_OVER_PREFILL * prefill_s))
    systems = [fleet[name] for name in names]
    pids = [pid for system in systems for pid in process_tree(system.server.process.pid)]
    # The disk is slow between rounds as well: a system that looks whether it has recovered shall
    # not see another disk than its requests do.
    with (
        throttle.limit(pids, bytes_per_s),
        bench.steps("slow_disk", LEARNING_ROUNDS + setting.rounds) as step,
    ):
        for number in range(LEARNING_ROUNDS + setting.rounds):
            bench.make_cold(systems)
            one: Round = {}
            with bench.counting_bytes(fleet, outcome):
                for place, conversation in enumerate(conversations):
                    request = conversation.turn(setting.num_new, setting.num_output)
                    sample = bench.ask_in_turn(fleet, names, request, number + place, one)
                    conversation.answered(request, sample)
            rounds.append(one)
            step()
    outcome.beside["learning"] = rounds[:LEARNING_ROUNDS]
    outcome.rounds = rounds[LEARNING_ROUNDS:]
    tokens = statistics.mean(len(conversation.history) for conversation in conversations)
    outcome.conditions = (
        f"reads limited to {bytes_per_s / 1e6:.1f} MB/s for all systems together by "
        f"{throttle.description}, where fetching {tokens:,.0f} tokens takes "
        f"{FETCH_OVER_PREFILL:.0f} times their prefill ({tokens * prefill_s:.2f} s); memory and "
        f"page cache emptied before each of {setting.rounds} rounds of {len(conversations)} "
        f"returns, {LEARNING_ROUNDS} more before them not measured; bytes are those of the last."
    )
    if not bench.conclude("slow_disk", outcome):
        return
    for peer in [name for name in names if name != "tiered"]:
        bench.report.add(
            f"slow_disk_ttft_over_{peer.replace('-', '_')}",
            round_quotients(outcome.rounds, peer, mean_ttft),
            wanted="<= 1.05" if peer == "stock" else "",
            beside=ttft_line(outcome.rounds, peer),
        )
    hits = {name: hits_by_tier(outcome.samples(name))["storage"] for name in names}
    bench.report.note(f"slow_disk: tokens fetched from the slow disk: {hits}.")
