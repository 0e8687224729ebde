"""What tiering costs where it has nothing to give: every prompt new, or all of it on the device."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from serving_bench import processor_time, stored_soon
from serving_bench.client import Request, ask_each
from serving_bench.conversations import make_conversations, random_tokens
from serving_bench.measures import (
    Outcome,
    Round,
    hits_by_tier,
    round_quotients,
    throughput,
    ttft_percentile,
)
from serving_bench.neighbour import busy_cores
from serving_bench.returning import ttft_line

if TYPE_CHECKING:
    from serving_bench.bench import Bench


SEED = 2
CONCURRENCY = 4


def run(bench: Bench) -> None:
    setting, fleet = bench.setting, bench.main_fleet()
    names = bench.choose("stock", "hicache-file", "tiered")
    source = random.Random(SEED)
    length = setting.prompt_tokens

    def fresh(label: str) -> Request:
        # One length for all, so that a percentile compares systems and not prompts.
        tokens = tuple(random_tokens(source, length))
        return Request(f"noreuse/{label}", tokens, setting.num_output)

    singles: list[Round] = []
    batches: list[Round] = []
    outcome = Outcome()
    with (
        bench.counting_bytes(fleet, outcome),
        bench.steps("noreuse", setting.rounds + setting.throughput_rounds) as step,
    ):
        for number in range(setting.rounds):
            one: Round = {}
            for place in range(setting.per_round):
                request = fresh(f"{number}/{place}")
                bench.ask_in_turn(fleet, names, request, number + place, one)
            singles.append(one)
            step()
        for number in range(setting.throughput_rounds):
            requests = [fresh(f"{number}/batch/{place}") for place in range(setting.per_round)]
            batch: Round = {}
            for system in fleet.in_turn(names, number):
                batch[system.name] = ask_each(system.url, requests, CONCURRENCY)
            batches.append(batch)
            step()
    outcome.rounds = [*singles, *batches]
    asked = (setting.rounds + setting.throughput_rounds) * setting.per_round
    outcome.new_tokens = asked * (length + setting.num_output)
    outcome.conditions = (
        f"{asked} prompts of {length:,} tokens, none seen before; TTFT one at a time, "
        f"throughput {CONCURRENCY} at a time; stores go on all the while."
    )
    if bench.conclude("noreuse", outcome):
        _report(bench, "noreuse", singles, batches)


def run_device(bench: Bench) -> None:
    """A few conversations that device memory holds, over and over."""
    setting, fleet = bench.setting, bench.main_fleet()
    names = bench.choose("stock", "hicache-file", "tiered")
    length = setting.prompt_tokens
    num_batches = setting.throughput_rounds * (2 if bench.neighbour else 1)
    returns = (setting.rounds + num_batches) * setting.per_round + 2
    growth = returns * (setting.num_new + setting.num_output)
    number_that_fit = max(1, int(setting.main.device_tokens * 0.8 - growth) // length)
    conversations = make_conversations("device", SEED, number_that_fit)
    first: Round = {}
    singles: list[Round] = []
    batches: list[Round] = []
    disturbed: list[Round] = []  # batches beside a neighbour that keeps cores busy
    parts = [(0, batches), *([(bench.neighbour, disturbed)] if bench.neighbour else [])]
    outcome = Outcome(beside={"first": [first]})
    turns: list[stored_soon.Turn] = []
    processor_s: dict[str, dict[str, float]] = {}
    for number, conversation in enumerate(conversations):
        request = conversation.turn(length, setting.num_output)
        sample = bench.ask_in_turn(fleet, names, request, number, first)
        conversation.answered(request, sample)
    with (
        processor_time.measuring(fleet.processes, processor_s),
        bench.steps("device", setting.rounds + setting.throughput_rounds) as step,
    ):
        for number in range(setting.rounds):
            one: Round = {}
            for place in range(setting.per_round):
                conversation = conversations[place % len(conversations)]
                request = conversation.turn(setting.num_new, setting.num_output)
                sample = bench.ask_in_turn(fleet, names, request, number + place, one)
                conversation.answered(request, sample)
                turns += stored_soon.answered_turns([request], one["tiered"][-1:])
            singles.append(one)
            step()
        for number in range(setting.throughput_rounds):
            for num_cores, into in parts:
                requests = [
                    conversations[place % len(conversations)].turn(
                        setting.num_new, setting.num_output, f"/batch/{num_cores}/{number}/{place}"
                    )
                    for place in range(setting.per_round)
                ]
                batch: Round = {}
                with busy_cores(num_cores):
                    for system in fleet.in_turn(names, number):
                        batch[system.name] = ask_each(system.url, requests, CONCURRENCY)
                turns += stored_soon.answered_turns(requests, batch["tiered"])
                into.append(batch)
            step()
    kept = stored_soon.run(bench, fleet, conversations, turns)
    outcome.rounds = [*singles, *batches]
    outcome.beside |= {"beside a neighbour": disturbed, "after kill -9": [kept.after]}
    held = sum(len(conversation.history) for conversation in conversations)
    outcome.conditions = (
        f"{len(conversations)} conversations, at the end {held:,} tokens = "
        f"{held / setting.main.device_tokens:.2f} of device memory; {setting.num_new} new tokens "
        "per return."
    )
    if bench.conclude("device", outcome):
        _report(bench, "device", singles, batches)
        _report_disturbed(bench, disturbed)
        stored_soon.report(bench, kept)
    _report_processor(bench, processor_s, [*singles, *batches, *disturbed])


def _report_processor(
    bench: Bench, processor_s: dict[str, dict[str, float]], rounds: list[Round]
) -> None:
    """Which threads computed in the rounds, and how long for a thousand tokens."""
    per_token: dict[str, dict[str, float]] = {}
    for name in rounds[0]:
        taken = [sample for one in rounds for sample in one[name]]
        thousands = sum(each.num_prompt + len(each.output_ids) for each in taken) / 1000
        per_token[name] = {
            label: seconds / thousands for label, seconds in processor_s[name].items()
        }
        bench.report.note(
            f"device: threads of {name}, {sum(per_token[name].values()) * 1e3:.1f} ms of the "
            f"processor per 1,000 tokens: {processor_time.describe_shares(per_token[name])}."
        )
    bench.report.raw["device"]["processor_s_per_1000_tokens"] = per_token


def _report_disturbed(bench: Bench, disturbed: list[Round]) -> None:
    """The throughput beside processes that keep cores busy, where there were any."""
    for peer in [name for one in disturbed[:1] for name in one if name != "tiered"]:
        bench.report.add(
            f"device_throughput_beside_neighbour_over_{peer.replace('-', '_')}",
            round_quotients(disturbed, peer, throughput),
            wanted=">= 0.98" if peer == "stock" else "",
            beside=f"{_rates(disturbed, peer)}; {bench.neighbour} cores kept busy",
        )


def _rates(rounds: list[Round], peer: str) -> str:
    rates = {
        name: sum(throughput(one[name]) for one in rounds) / len(rounds)
        for name in ("tiered", peer)
    }
    return " / ".join(f"{name} {rate:,.0f} tokens/s" for name, rate in rates.items())


def _report(bench: Bench, scenario: str, singles: list[Round], batches: list[Round]) -> None:
    report = bench.report
    pooled = [{name: [s for one in singles for s in one[name]] for name in singles[0]}]
    for peer in [name for name in singles[0] if name != "tiered"]:
        suffix = peer.replace("-", "_")
        aim = peer == "stock"
        report.add(
            f"{scenario}_ttft_over_{suffix}",
            round_quotients(singles, peer, ttft_percentile(0.5)),
            wanted="<= 1.03" if aim else "",
            beside=f"p50; means {ttft_line(singles, peer)}",
        )
        report.add(
            f"{scenario}_ttft_p99_over_{suffix}",
            round_quotients(pooled, peer, ttft_percentile(0.99)),
            wanted="<= 1.03" if aim else "",
            beside=f"of {len(pooled[0][peer])} requests each",
        )
        report.add(
            f"{scenario}_throughput_over_{suffix}",
            round_quotients(batches, peer, throughput),
            wanted=">= 0.98" if aim else "",
            beside=_rates(batches, peer),
        )
    hits = hits_by_tier([s for one in [*singles, *batches] for s in one["tiered"]])
    report.note(f"{scenario}: hit tokens of tiered by tier: {hits}.")
