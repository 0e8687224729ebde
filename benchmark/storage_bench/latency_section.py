"""How long a load takes while nothing else happens, and while stores run at full rate."""

from __future__ import annotations

import collections
import random
import threading
import time
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import JobKind, Run
from storage_bench.figures import percentile
from storage_bench.host_memory import HostPages
from storage_bench.keys import make_keys
from storage_bench.own_engine import (
    PAGES_PER_RUN,
    empty,
    make_durable,
    make_runs,
    move_runs,
    open_engine,
    wait,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sglang_tiered.storage.base import Job
    from sglang_tiered.storage.region.engine import RegionEngine
    from storage_bench.setting import Setting


PAGE_BYTES = 1 << 20
_RUN_BYTES = PAGES_PER_RUN * PAGE_BYTES
_NUM_LOADED = 4  # runs in the store that are loaded
_STORES_IN_FLIGHT = 4


def _num_loads(quick: bool) -> int:
    """Per phase."""
    return 10 if quick else 20


def _num_stores(quick: bool) -> int:
    """At most so many runs in a phase: the store must not evict what is loaded."""
    return 32 if quick else 96


def _capacity_bytes(quick: bool) -> int:
    return (_num_stores(quick) + _NUM_LOADED) * _RUN_BYTES * 5 // 4


def needed_bytes(quick: bool) -> int:
    return _capacity_bytes(quick) + (1 << 30)


def num_files(quick: bool) -> int:
    return 1000


class _FullRate:
    """Stores run after run until told to stop or out of runs; a few are always queued."""

    def __init__(self, engine: RegionEngine, memory: HostPages, name: str, num_runs: int) -> None:
        self._engine = engine
        self._memory = memory
        self._name = name
        self._num_runs = num_runs
        self._stop = threading.Event()
        self._num_done = 0
        self._failure: Exception | None = None
        self._start = time.perf_counter()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> float:
        """Stop, and tell the bytes per second so far. Raises what the thread raised."""
        self._stop.set()
        self._thread.join()
        if self._failure:
            raise self._failure
        return self._num_done * _RUN_BYTES / (time.perf_counter() - self._start)

    def _run(self) -> None:
        jobs: collections.deque[Job] = collections.deque()
        try:
            for number in range(self._num_runs):
                if self._stop.is_set():
                    break
                if len(jobs) == _STORES_IN_FLIGHT:
                    self._finish(jobs.popleft())
                keys = make_keys(f"{self._name}/{number}", PAGES_PER_RUN)
                jobs.append(self._engine.submit_store(Run(keys, self._memory.pages)))
            while jobs:
                self._finish(jobs.popleft())
        except Exception as error:
            self._failure = error

    def _finish(self, job: Job) -> None:
        wait(job)
        self._num_done += 1


def run(setting: Setting) -> None:
    with (
        setting.workspace.folder("latency") as folder,
        setting.steps("latency", 2 * setting.num_samples) as step,
    ):
        idle, busy, rates = _measure(setting, folder, step)
    report = setting.report
    beside = f"64 pages of 1 MiB; {len(idle)} idle, {len(busy)} beside stores"
    for share in (0.5, 0.99):
        name = f"p{share * 100:.0f}"
        values = [1e3 * percentile(taken, share) for taken in (idle, busy)]
        report.add(f"load_ms_idle_{name}", [values[0]], beside=beside)
        report.add(f"load_ms_under_stores_{name}", [values[1]], beside=beside)
    report.add("store_gb_s_under_loads", [rate / 1e9 for rate in rates], beside="meanwhile")
    report.raw["latency"] = {"idle_s": idle, "under_stores_s": busy, "store_bytes_per_s": rates}
    report.settings["latency"] = {
        "page_bytes": PAGE_BYTES,
        "pages_per_run": PAGES_PER_RUN,
        "stores_in_flight": _STORES_IN_FLIGHT,
    }


def _measure(
    setting: Setting, folder: Path, step: Callable[[], None]
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of loads idle and under stores, and bytes per second of those stores."""
    source = HostPages(_NUM_LOADED * PAGES_PER_RUN, PAGE_BYTES, seed=2)
    target = HostPages(PAGES_PER_RUN, PAGE_BYTES)
    noise = HostPages(PAGES_PER_RUN, PAGE_BYTES, seed=3)
    chance = random.Random(0)
    idle: list[float] = []
    busy: list[float] = []
    rates: list[float] = []
    engine = open_engine(folder, _capacity_bytes(setting.quick))

    def load(sample: int) -> float:
        number = chance.randrange(_NUM_LOADED)
        keys = make_keys(f"{sample}/{number}", PAGES_PER_RUN)
        target.poison()
        start = time.perf_counter()
        wait(engine.submit_load(Run(keys, target.pages)))
        seconds = time.perf_counter() - start
        target.check_equal(0, source, number * PAGES_PER_RUN, PAGES_PER_RUN)
        return seconds

    try:
        for sample in range(setting.num_samples):
            empty(engine)
            keys = [make_keys(f"{sample}/{number}", PAGES_PER_RUN) for number in range(_NUM_LOADED)]
            move_runs(engine, JobKind.STORE, make_runs(keys, source), _NUM_LOADED)
            make_durable(engine)
            setting.workspace.settle()
            idle += [load(sample) for _ in range(_num_loads(setting.quick))]
            step()
            stores = _FullRate(engine, noise, f"noise {sample}", _num_stores(setting.quick))
            taken: list[float] = []
            try:
                while len(taken) < _num_loads(setting.quick):
                    seconds = load(sample)
                    if not stores.running:
                        break
                    taken.append(seconds)
            finally:
                rates.append(stores.end())
            busy += taken
            step()
    finally:
        engine.close()
    return idle, busy, rates
