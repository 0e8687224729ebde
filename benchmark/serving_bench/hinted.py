"""A turn whose conversation was hinted at while its user still typed, beside one that was not.

Reads are paced so that loading takes 0.57 of the prefill, as for an 8B model on an H200 with one
drive of 7 GB/s. The hint is given as soon as memory is empty, and the turn is asked once what it
brings is there.
"""

from __future__ import annotations

import random
import time
import urllib.error
from typing import TYPE_CHECKING

from serving_bench.balanced import paced_bytes_per_s, prefill_s_per_token
from serving_bench.client import Request, RequestFailedError, ask_each
from serving_bench.conversations import random_tokens
from serving_bench.disk_added import share_from
from serving_bench.measures import Outcome, Round, mean_ttft
from serving_bench.paced_disk import PacedDisk, achieved_bytes_per_s
from serving_bench.setting import PAGE_SIZE
from storage_bench.figures import quotients

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving_bench.bench import Bench
    from serving_bench.systems import Fleet


SEED = 11
LOAD_OVER_PREFILL = 0.57
LEARNING_ROUNDS = 1
AFTER_HINT = "after a hint"  # on the server that is also asked without one
HINT_DEADLINE_S = 60.0
WAYS = ("stock", "tiered", AFTER_HINT)


def run(bench: Bench) -> None:
    if "stock" not in bench.names:
        bench.report.note("hinted: needs stock among the systems, whose prefill it measures.")
        return
    bench.close_main_fleet()
    with bench.workspace.folder("paced") as folder:
        disk = PacedDisk(folder)
        names = ("stock", "tiered")
        with bench.fleet(names, bench.setting.main, disk.environment) as fleet:
            bench.warm_up(fleet)
            _measure(bench, fleet, disk)


def bring_up(fleet: Fleet, history: Request) -> None:
    """Give the hint, and wait until it has no more to load. Raises ``RequestFailedError``."""
    body = {"input_ids": list(history.prompt), "wait_s": 30}
    deadline = time.monotonic() + HINT_DEADLINE_S
    try:
        while fleet["tiered"].server.request("/tier/prefetch", body)["num_loading"]:
            if time.monotonic() > deadline:
                raise RequestFailedError(f"the hint of {history.label} does not end")
    except urllib.error.HTTPError as error:
        raise RequestFailedError(f"the hint of {history.label} was refused: {error}") from error


def _measure(bench: Bench, fleet: Fleet, disk: PacedDisk) -> None:
    setting, source = bench.setting, random.Random(SEED)
    length = setting.contexts[0] // PAGE_SIZE * PAGE_SIZE
    histories = [
        Request(f"hinted/{number}/opening", tuple(random_tokens(source, length)), 1)
        for number in range(setting.per_round)
    ]
    opened: Round = {}
    for number, history in enumerate(histories):
        bench.ask_in_turn(fleet, ("stock", "tiered"), history, number, opened)
    prefill_s = _prefill_s_per_token(bench, fleet, histories, source)
    speed = paced_bytes_per_s(LOAD_OVER_PREFILL, prefill_s, bench.kv_bytes_per_token)
    disk.set_speed(speed)
    learning: list[Round] = []
    rounds: list[Round] = []
    total, start = LEARNING_ROUNDS + setting.rounds, 0
    with bench.steps("hinted", total) as step:
        for number in range(total):
            if number == LEARNING_ROUNDS:
                start = len(disk.reads("tiered"))
            taken = learning if number < LEARNING_ROUNDS else rounds
            taken.append(_ask_round(bench, fleet, histories, source, number))
            step()
    achieved = achieved_bytes_per_s(disk.reads("tiered", start))
    disk.set_speed(0)
    load_over_prefill = bench.kv_bytes_per_token / max(achieved, 1.0) / prefill_s
    outcome = Outcome(rounds=rounds, beside={"first": [opened], "learning": learning})
    outcome.conditions = (
        f"{len(histories)} conversations of {length:,} tokens and {PAGE_SIZE} new ones, one at a "
        "time, device and host memory and page cache emptied before each turn, and then hinted at "
        f"or not; R = {load_over_prefill:.2f} as measured; {LEARNING_ROUNDS} round before these."
    )
    if bench.conclude("hinted", outcome):
        _report(bench, rounds)
    bench.report.raw["hinted"] |= {
        "bytes_per_s": speed,
        "achieved_bytes_per_s": achieved,
        "prefill_s_per_token": prefill_s,
    }


def _prefill_s_per_token(
    bench: Bench, fleet: Fleet, histories: Sequence[Request], source: random.Random
) -> float:
    """Of stock: what turns take longer without their history than with it on the device."""
    full, new = [], []
    for number, history in enumerate(histories):
        bench.make_cold([fleet["stock"]])
        for taken, which in ((full, "cold"), (new, "again")):
            turn = _turn(bench, history, source, f"hinted/{number}/{which}")
            taken.extend(ask_each(fleet["stock"].url, [turn]))
    return prefill_s_per_token(full, new)


def _turn(bench: Bench, history: Request, source: random.Random, label: str) -> Request:
    prompt = (*history.prompt, *random_tokens(source, PAGE_SIZE))
    return Request(label, prompt, bench.setting.num_output, len(history.prompt))


def _ask_round(
    bench: Bench, fleet: Fleet, histories: Sequence[Request], source: random.Random, number: int
) -> Round:
    """The same turn of each conversation in each way, whoever was last being first next time. Its
    new tokens fill a page, of which the last token is computed: no way finds more than another."""
    one: Round = {}
    for place, history in enumerate(histories):
        turn = _turn(bench, history, source, f"hinted/{number}/{place}")
        for way in WAYS if (number + place) % 2 else reversed(WAYS):
            system = fleet["stock" if way == "stock" else "tiered"]
            bench.make_cold([system])
            if way == AFTER_HINT:
                bring_up(fleet, history)
            one.setdefault(way, []).extend(ask_each(system.url, [turn]))
    return {way: one[way] for way in WAYS}


def _report(bench: Bench, rounds: Sequence[Round]) -> None:
    means = {way: [mean_ttft(one[way]) for one in rounds] for way in WAYS}
    pooled = {way: [sample for one in rounds for sample in one[way]] for way in WAYS}
    from_host = share_from(pooled[AFTER_HINT], "device", "host")
    from_nvme = share_from(pooled["tiered"], "storage")
    shown = ", ".join(f"{way} {1e3 * mean_ttft(pooled[way]):.0f} ms" for way in WAYS)
    if from_host < 0.9:  # it was no warm return that would be compared
        bench.report.note(f"hinted: only {from_host:.0%} were in memory, so nothing is compared.")
        return
    bench.report.add(
        "hinted_ttft_over_nvme",
        quotients(means[AFTER_HINT], means["tiered"]),
        wanted="<= 0.6",
        beside=f"{shown}; {from_host:.0%} in memory, {from_nvme:.0%} loaded without a hint",
    )
    bench.report.add("hinted_ttft_over_stock", quotients(means[AFTER_HINT], means["stock"]))
