"""The region store under everything at once, for as long as ``scripts/soak`` says.

Threads store, load, cancel, pass barriers and erase, on a device that fails now and then, beyond
the cap, so that regions are evicted all the time. Between rounds nothing may be left over. What the
short suites do with a few seeds, crashes and kills, goes on with new ones.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from simulation.killing import kill_loop
from simulation.ledger import TIMEOUT_S, Ledger, Loaded, keys
from simulation.lives import live_below_capacity, live_full

from kit.faulty import FaultyDevice
from kit.runs import NAMESPACE
from kit.waiting import drained, eventually
from sglang_tiered.storage.base import Erasure, Health, Reason
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice

SECONDS = float(os.environ.get("SOAK_SECONDS", "0"))

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(0),
    pytest.mark.skipif(SECONDS <= 0, reason="SOAK_SECONDS is not set; run scripts/soak"),
]

REGION = 2 << 20
CAPACITY = 10 * REGION
NUM_KEYS = 8000  # three times what fits
NUM_WORKERS = 4
ROUND_S = 5.0
NUM_WARM_UP_ROUNDS = 2
# What a round may add for good: the allocator's own waste, far below one round's worth of pages.
MAX_GROWTH_BYTES = 24 << 20
FAILURE_RATE = 0.002

malloc_trim = ctypes.CDLL(None).malloc_trim


def fast_clock() -> float:
    """A hundred times as fast as it is, so that pauses after a failure pass within a round."""
    return time.monotonic() * 100.0


def open_engine(directory: Path, device: FaultyDevice) -> RegionEngine:
    return RegionEngine(
        directory,
        namespace=NAMESPACE,
        capacity_bytes=CAPACITY,
        region_bytes=REGION,
        num_threads=3,
        io_timeout_s=36_000.0,
        sync_interval_s=10.0,
        max_queued_store_bytes=1 << 20,
        device=device,
        clock=fast_clock,
    )


class Worker(threading.Thread):
    """Mixed work until told to stop; remembers the first thing that went wrong."""

    def __init__(self, engine: RegionEngine, seed: int, stop: threading.Event) -> None:
        super().__init__(name=f"soak-{seed}", daemon=True)
        self.error: BaseException | None = None
        self._engine = engine
        self._source = random.Random(seed)
        self._stop_work = stop

    def run(self) -> None:
        try:
            while not self._stop_work.is_set():
                self._step()
        except BaseException as error:  # the test re-raises it
            self.error = error

    def _step(self) -> None:
        ledger = Ledger()
        kind = self._source.random()
        chosen = self._chain()
        if kind < 0.40:
            ledger.store(self._engine, chosen)
        elif kind < 0.75:
            hits = self._engine.lookup(chosen).num_hits
            ledger.load(self._engine, chosen[: max(hits, 1)])
        elif kind < 0.85:
            jobs = [ledger.submit(self._engine, self._chain()) for _ in range(6)]
            for job in self._source.sample(jobs, 3):
                job.cancel()
            for job in jobs:
                ledger.settle(job)
        elif kind < 0.92:
            load = Loaded(NAMESPACE, self._chain())
            job = self._engine.submit_load(load.run)
            job.cancel()
            load.check(job)
        elif kind < 0.95:
            self._engine.flush(TIMEOUT_S)
        elif kind < 0.951:
            is_true(self._engine.erase(Erasure()), TIMEOUT_S)
        else:
            self._engine.stats()

    def _chain(self) -> list[bytes]:
        """A prefix of a chain as requests bring it; short numbers are hot."""
        start = int(NUM_KEYS * self._source.random() ** 3)
        return keys(range(start, start + self._source.randint(1, 12)))


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def work(engine: RegionEngine, seeds: Sequence[int], seconds: float) -> None:
    stop = threading.Event()
    workers = [Worker(engine, seed, stop) for seed in seeds]
    for worker in workers:
        worker.start()
    stop.wait(seconds)
    stop.set()
    for worker in workers:
        worker.join(4 * TIMEOUT_S)
        assert not worker.is_alive(), "a worker hangs"
    for worker in workers:
        if worker.error is not None:
            raise worker.error


def expect_quiet(engine: RegionEngine, directory: Path, closed_descriptors: int) -> None:
    assert drained(engine, TIMEOUT_S)
    stats = engine.stats()
    assert stats.num_inflight_jobs == 0 and stats.queued_store_bytes == 0
    assert stats.physical_bytes <= CAPACITY
    engine.check_integrity()  # pins included, as nothing is under way
    regions = len(list(directory.glob("region-*.kv")))
    opened = num_descriptors() - closed_descriptors
    assert opened <= regions + 8, f"{opened} descriptors for {regions} regions"


def expect_service(engine: RegionEngine, device: FaultyDevice, number: int) -> None:
    """Without failures everything works again, whatever this round did."""
    device.failure_rate = 0.0
    eventually(lambda: engine.stats().health is Health.RUNNING)
    ledger, fresh = Ledger(), keys(range(100_000 + 4 * number, 100_004 + 4 * number))
    stored = {Reason.OK, Reason.DUPLICATE}
    eventually(lambda: set(ledger.store(engine, fresh)) <= stored)
    assert ledger.load(engine, fresh) == [Reason.OK] * len(fresh)
    if not ledger.sync(engine):  # pages are held that a sync failed on
        is_true(engine.erase(Erasure()), TIMEOUT_S)
        assert ledger.sync(engine)


def test_nothing_leaks_and_nothing_lies(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    directory.mkdir(mode=0o700)
    end = time.monotonic() + 0.6 * SECONDS
    device = FaultyDevice(FileDevice(directory))
    before = set(threading.enumerate()), num_descriptors()
    engine = open_engine(directory, device)
    memory: list[int] = []
    for number in itertools.count():
        device.failure_rate = FAILURE_RATE if number % 2 else 0.0
        work(engine, range(NUM_WORKERS * number, NUM_WORKERS * (number + 1)), ROUND_S)
        device.calls.clear()  # the record of the fault device is no leak of the engine
        expect_service(engine, device, number)
        expect_quiet(engine, directory, before[1])
        gc.collect()
        malloc_trim(0)  # else what threads that ended left unused in their arenas counts as a leak
        memory.append(psutil.Process().memory_info().rss)
        print(f"round {number}: {memory[-1] >> 20} MiB, {engine.stats()}")
        is_over = time.monotonic() > end
        if is_over or number % 4 == 3:
            engine.close()
            assert (set(threading.enumerate()), num_descriptors()) == before, "left by the engine"
        if is_over:
            break
        if number % 4 == 3:
            engine = open_engine(directory, device)
    if len(memory) > NUM_WARM_UP_ROUNDS:
        growth = memory[-1] - max(memory[: NUM_WARM_UP_ROUNDS + 1])
        assert growth < MAX_GROWTH_BYTES, f"{growth >> 20} MiB more: {memory}"


def test_lives_and_kills_with_new_seeds(tmp_path: Path) -> None:
    end = time.monotonic() + 0.4 * SECONDS
    for seed in itertools.count(1000):
        try:
            live_below_capacity(tmp_path, seed)
            live_full(tmp_path, seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        kill_loop(tmp_path / str(seed), seed=seed, num_kills=20, up_to=150)
        if time.monotonic() > end:
            break
