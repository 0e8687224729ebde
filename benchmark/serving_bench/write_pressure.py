"""Returning turns while every other request is new and the disk is busy with writes."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from serving_bench.client import Request, ask_each
from serving_bench.conversations import make_conversations, random_tokens
from serving_bench.measures import Outcome, Round, hit_rate, mean_ttft
from storage_bench.figures import quotients

if TYPE_CHECKING:
    from collections.abc import Iterator

    from serving_bench.bench import Bench
    from serving_bench.systems import System


SEED = 5
SYSTEMS = ("hicache-file", "tiered")
NUM_CLIENTS = 2  # that send new prompts, one after the other


def run(bench: Bench) -> None:
    setting, fleet = bench.setting, bench.main_fleet()
    names = bench.choose(*SYSTEMS)
    conversations = make_conversations("write_pressure", SEED, setting.per_round)
    first: Round = {}
    idle: list[Round] = []
    busy: list[Round] = []
    written: list[float] = []
    for number, conversation in enumerate(conversations):
        request = conversation.turn(setting.prompt_tokens, setting.num_output)
        sample = bench.ask_in_turn(fleet, names, request, number, first)
        conversation.answered(request, sample)

    with bench.steps("write_pressure", setting.rounds) as step:
        for number in range(setting.rounds):
            for rounds, title in ((idle, "idle"), (busy, "busy")):
                requests = [
                    conversation.turn(setting.num_new, setting.num_output, f"/{title}/{number}")
                    for conversation in conversations
                ]
                one: Round = {}
                for system in fleet.in_turn(names, number):
                    bench.make_cold([system])
                    with contextlib.ExitStack() as stack:
                        if title == "busy":
                            stack.enter_context(_new_prompts(bench, system, number))
                            stack.enter_context(_busy_disk(bench, written))
                        one[system.name] = ask_each(system.url, requests)
                rounds.append(one)
            step()

    outcome = Outcome(rounds=busy, beside={"first": [first], "idle": idle})
    rate = sum(written) / len(written) / 1e6 if written else 0.0
    outcome.conditions = (
        f"{len(conversations)} conversations return one at a time with memory and page cache "
        f"emptied before, alone and beside {NUM_CLIENTS} clients that send new prompts and a "
        f"process that writes {rate:,.0f} MB/s to the same disk."
    )
    if bench.conclude("write_pressure", outcome):
        _report(bench, names, idle, busy)


def _report(bench: Bench, names: list[str], idle: list[Round], busy: list[Round]) -> None:
    for name in names:
        rates = [[hit_rate(one[name]) for one in rounds] for rounds in (busy, idle)]
        if not all(rates[1]):
            bench.report.note(f"write_pressure: {name} had no hits on an idle disk.")
            continue
        ttft = [
            mean_ttft([sample for one in rounds for sample in one[name]]) for rounds in (busy, idle)
        ]
        prefix = "" if name == "tiered" else "hicache_file_"
        bench.report.add(
            f"{prefix}write_pressure_hit_rate_over_idle",
            quotients(rates[0], rates[1]),
            wanted=">= 0.9" if name == "tiered" else "",
            beside=f"hit rate {sum(rates[0]) / len(rates[0]):.0%} / "
            f"{sum(rates[1]) / len(rates[1]):.0%}, TTFT {ttft[0] * 1e3:.0f} / "
            f"{ttft[1] * 1e3:.0f} ms",
        )


@contextlib.contextmanager
def _new_prompts(bench: Bench, system: System, number: int) -> Iterator[None]:
    """Clients that ask for what nobody asked before, each waiting for its answer."""
    ended = threading.Event()
    length = bench.setting.prompt_tokens

    def client(index: int) -> None:
        source = random.Random(f"{SEED}/{system.name}/{number}/{index}")
        while not ended.is_set():
            request = Request("new", tuple(random_tokens(source, length)), 2)
            ask_each(system.url, [request])

    threads = [threading.Thread(target=client, args=(index,)) for index in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def _busy_disk(bench: Bench, written: list[float]) -> Iterator[None]:
    """A neighbour that writes as fast as the disk takes it; its bytes per second are noted."""
    with bench.workspace.folder("neighbour") as folder:
        script = Path(__file__).parent / "disk_writer.py"
        start_s = time.perf_counter()
        process = subprocess.Popen([sys.executable, str(script), str(folder / "file")])
        try:
            yield
        finally:
            with contextlib.suppress(psutil.Error):
                counters = psutil.Process(process.pid).io_counters()
                written.append(counters.write_bytes / (time.perf_counter() - start_s))
            process.kill()
            process.wait()
