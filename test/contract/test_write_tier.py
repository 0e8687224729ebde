"""What ``TierEngine`` promises of stores, over everything that keeps pages."""

from __future__ import annotations

import os
import secrets
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from shared_tier import SharedTier

from kit.faulty import FaultyEngine
from kit.runs import NAMESPACE, Blank, MakeRun, PageData
from kit.waiting import drained
from sglang_tiered.storage.base import (
    Erasure,
    Health,
    Job,
    JobKind,
    LookupResult,
    Reason,
    Run,
    Stop,
    TierEngine,
)
from sglang_tiered.storage.bucket import BucketEngine, BucketSettings
from sglang_tiered.storage.memory import MemoryEngine
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.stack import TierStack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


TIMEOUT_S = 20.0
CAPACITY = 1 << 20
QUEUE = 512 * 1024  # of stores, where an engine has one
ODD_SIZES = (1, 4095, 4096, 4097, 65536, (100, 3996), (4096, 1, 8191), (0, 7), 12288)


def make_region_engine(directory: Path, *, direct: bool | None) -> RegionEngine:
    directory.mkdir(mode=0o700)
    return RegionEngine(
        directory,
        namespace=NAMESPACE,
        capacity_bytes=CAPACITY,
        region_bytes=256 * 1024,
        num_readers=2,
        max_queued_store_bytes=QUEUE,
        device=FileDevice(directory, direct=direct),
    )


def make_object_engine(url: str) -> BucketEngine:
    settings = BucketSettings(
        url=url,
        staging_bytes=QUEUE,
        capacity_bytes=CAPACITY,
        num_connections=2,
    )
    return BucketEngine(settings, namespace=NAMESPACE)


ENGINES = [
    "memory",
    "region-direct",
    "region-buffered",
    "faulty-without-faults",
    "object-memory",
    "object-directory",
    "stack",
]
BUCKET = os.environ.get("SGLANG_TIERED_TEST_BUCKET")
if BUCKET:  # any URL of an object tier; credentials are where they always are
    ENGINES.append("object-url")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierEngine]:
    made: TierEngine
    if request.param == "memory":
        made = MemoryEngine(CAPACITY)
    elif request.param == "faulty-without-faults":
        made = FaultyEngine(MemoryEngine(CAPACITY))
    elif request.param == "object-memory":
        made = make_object_engine(f"memory://{tmp_path}")
    elif request.param == "object-directory":
        made = make_object_engine((tmp_path / "store").as_uri())
    elif request.param == "object-url":
        made = make_object_engine(f"{BUCKET}/{secrets.token_hex(8)}")
    elif request.param == "stack":
        # Nothing moves between the tiers, so that all outcomes are those of one run.
        peer = SharedTier()
        peer.known = False
        made = TierStack(make_region_engine(tmp_path / "store", direct=None), [peer])
    else:
        direct = None if request.param == "region-direct" else False
        made = make_region_engine(tmp_path / "store", direct=direct)
    yield made
    assert drained(made, TIMEOUT_S)
    made.check_integrity()
    made.close()


def store(engine: TierEngine, run: Run) -> list[Reason]:
    return finished(engine.submit_store(run)).reasons


def load(engine: TierEngine, run: Run) -> list[Reason]:
    return finished(engine.submit_load(run)).reasons


def finished(job: Job) -> Job:
    assert job.wait(TIMEOUT_S), "the job did not finish"
    return job


def select(run: Run, positions: list[int]) -> Run:
    return Run(tuple(run.keys[i] for i in positions), tuple(run.pages[i] for i in positions))


def test_storing_twice_is_a_successful_duplicate(engine: TierEngine, make_run: MakeRun) -> None:
    run = make_run(7, [4096, 4096])
    store(engine, select(run, [0]))
    job = finished(engine.submit_store(run))
    assert job.reasons == [Reason.DUPLICATE, Reason.OK]
    assert job.ok == [True, True]
    assert job.num_leading_ok == 2


def test_a_page_beyond_the_tier_has_no_space(engine: TierEngine, make_run: MakeRun) -> None:
    run = make_run(8, [100, CAPACITY + 1])
    assert store(engine, run) == [Reason.OK, Reason.NO_SPACE]


def test_a_store_beyond_the_queue_goes_in_parts(
    engine: TierEngine, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    run = rest = make_run(17, [16_384] * 40)
    assert QUEUE < run.num_bytes < CAPACITY
    while rest.num_pages:
        num_taken = finished(engine.submit_store(rest)).num_leading_ok
        assert num_taken, f"the last {rest.num_pages} of {run.num_pages} pages are never taken"
        rest = select(rest, list(range(num_taken, rest.num_pages)))
    assert engine.lookup(run.keys) == LookupResult(run.num_pages, Stop.END)
    target = blank(run)
    assert set(load(engine, target)) == {Reason.OK}
    assert page_data(target) == page_data(run)


def test_a_full_queue_drops_from_the_end(engine: TierEngine, make_run: MakeRun) -> None:
    runs = [make_run(seed, [16_384] * 40) for seed in range(300, 304)]
    outcomes: Counter[tuple[JobKind, Reason]] = Counter()
    for number, job in enumerate([engine.submit_store(run) for run in runs]):
        reasons = finished(job).reasons
        num_taken = job.num_leading_ok
        assert num_taken or number, "nothing was queued, and not one page was taken"
        assert reasons[num_taken:] == [Reason.REJECTED] * (job.run.num_pages - num_taken)
        outcomes.update((JobKind.STORE, reason) for reason in reasons)
    stats = engine.stats()
    assert stats.reasons == outcomes
    assert stats.num_pages_stored == outcomes[JobKind.STORE, Reason.OK]
    assert stats.queued_store_bytes == 0


def test_eviction_holds_the_cap_and_forgets_the_oldest(
    engine: TierEngine, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    runs = [make_run(seed, [16_384] * 8) for seed in range(100, 130)]
    for run in runs:
        assert set(store(engine, run)) == {Reason.OK}
        stats = engine.stats()
        assert stats.physical_bytes <= stats.capacity_bytes
    assert engine.lookup(runs[0].keys).num_hits == 0
    assert engine.lookup(runs[-1].keys).num_hits == 8
    assert engine.stats().num_pages_evicted > 0
    target = blank(runs[-1])
    assert set(load(engine, target)) == {Reason.OK}
    assert page_data(target) == page_data(runs[-1])


def test_the_store_lets_go_of_the_buffers(
    engine: TierEngine, make_run: MakeRun, blank: Blank
) -> None:
    original = make_run(9, [4096, 4097])
    buffers = [bytearray(b"".join(page)) for page in original.pages]
    run = Run(original.keys, tuple((memoryview(buffer),) for buffer in buffers))
    store(engine, run)
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    target = blank(run)
    assert load(engine, target) == [Reason.OK] * 2
    assert [b"".join(page) for page in target.pages] == [b"".join(p) for p in original.pages]


def test_cancelled_store_still_finishes(engine: TierEngine, make_run: MakeRun) -> None:
    run = make_run(11, [65_536] * 8)
    job = engine.submit_store(run)
    job.cancel()
    finished(job)
    assert set(job.reasons) <= {Reason.OK, Reason.CANCELLED}
    assert engine.lookup(run.keys).num_hits == job.num_leading_ok


def test_clear_forgets_everything_and_works_on(
    engine: TierEngine, make_run: MakeRun, blank: Blank
) -> None:
    run = make_run(12, [4096] * 4)
    store(engine, run)
    is_true(engine.erase(Erasure()), TIMEOUT_S)
    stats = engine.stats()
    assert (stats.num_pages, stats.stored_bytes, stats.physical_bytes) == (0, 0, 0)
    assert load(engine, blank(run)) == [Reason.MISS] * 4
    assert store(engine, run) == [Reason.OK] * 4


def test_closed_engine_answers_and_never_raises(
    engine: TierEngine, make_run: MakeRun, blank: Blank
) -> None:
    run = make_run(13, [4096] * 2)
    store(engine, run)
    engine.close()
    engine.close()
    assert engine.lookup(run.keys) == LookupResult(0, Stop.UNHEALTHY)
    assert store(engine, run) == [Reason.CANCELLED] * 2
    assert load(engine, blank(run)) == [Reason.CANCELLED] * 2
    is_true(engine.erase(Erasure()), TIMEOUT_S)
    assert drained(engine, 0.0)
    assert engine.stats().health is Health.FAILED


def test_visible_only_when_readable(
    engine: TierEngine, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    runs = [make_run(seed, [4096] * 4) for seed in range(200, 230)]
    wrong: list[str] = []
    submitted = threading.Event()

    def reader() -> None:
        for run in runs:
            while engine.lookup(run.keys).num_hits < run.num_pages and not submitted.is_set():
                pass
            num_hits = engine.lookup(run.keys).num_hits
            target = blank(select(run, list(range(num_hits))))
            if num_hits and load(engine, target) != [Reason.OK] * num_hits:
                wrong.append("a visible page could not be read")
            if page_data(target) != page_data(run)[:num_hits]:
                wrong.append("a visible page held other bytes")

    thread = threading.Thread(target=reader)
    thread.start()
    for run in runs:
        finished(engine.submit_store(run))
    submitted.set()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert not wrong


def test_concurrent_stores_and_loads(
    engine: TierEngine, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    wrong: list[object] = []

    def work(worker: int) -> None:
        for step in range(15):
            run = make_run(1000 * (worker % 2) + step, [8192, 100, (5000, 5000)] * 3)
            finished(engine.submit_store(run))
            target = blank(run)
            reasons = load(engine, target)
            for i, reason in enumerate(reasons):
                if reason is Reason.OK and page_data(target)[i] != page_data(run)[i]:
                    wrong.append((worker, step, i))
                if reason not in (Reason.OK, Reason.MISS):
                    wrong.append(reason)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_the_books_balance(engine: TierEngine, make_run: MakeRun, blank: Blank) -> None:
    run = make_run(14, [4096, 5000, 100])
    store(engine, run)
    store(engine, run)
    load(engine, blank(run))
    load(engine, blank(make_run(15, [100])))
    stats = engine.stats()
    assert stats.reasons == {
        (JobKind.STORE, Reason.OK): 3,
        (JobKind.STORE, Reason.DUPLICATE): 3,
        (JobKind.LOAD, Reason.OK): 3,
        (JobKind.LOAD, Reason.MISS): 1,
    }
    assert (stats.num_pages, stats.stored_bytes) == (3, run.num_bytes)
    assert (stats.num_pages_stored, stats.bytes_stored) == (3, run.num_bytes)
    assert (stats.num_pages_loaded, stats.bytes_loaded) == (3, run.num_bytes)
    assert stats.bytes_written >= run.num_bytes
    assert stats.num_inflight_jobs == 0
    assert stats.health is Health.RUNNING
    assert stats.store_durations.count == 1, "a store that made nothing durable counts"
    assert 0.0 < stats.store_durations.sum_s < TIMEOUT_S


def damage(engine: TierEngine, directory: Path, data: bytes) -> None:
    """Flip a bit of the stored copy of ``data``, behind the engine's back."""
    inner = engine.inner if isinstance(engine, FaultyEngine) else engine
    if isinstance(inner, MemoryEngine):
        for page in inner._pages.values():
            if page.data == data:
                page.data[0] ^= 1
        return
    if isinstance(inner, BucketEngine):
        client, folder = inner._requests, inner._state.layout.pages
        for listed in [entry for chunk in client.listing(folder) for entry in chunk]:
            stored = bytearray(client.get(listed.path, listed.size))
            position = stored.find(data)
            if position >= 0:
                stored[position] ^= 1
                client.put(listed.path, bytes(stored))
        return
    for file in directory.glob("*.kv"):
        position = file.read_bytes().find(data)
        if position >= 0:
            with file.open("r+b") as stream:
                stream.seek(position)
                stream.write(bytes([data[0] ^ 1]))


def test_a_flipped_bit_is_corrupt_then_a_miss(
    engine: TierEngine, tmp_path: Path, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    run = make_run(16, [4096, 4096, 4096])
    store(engine, run)
    damage(engine, tmp_path / "store", page_data(run)[1])
    target = blank(run)
    assert load(engine, target) == [Reason.OK, Reason.CORRUPT, Reason.OK]
    assert load(engine, blank(run)) == [Reason.OK, Reason.MISS, Reason.OK]
    assert engine.lookup(run.keys).num_hits == 1
    assert store(engine, run) == [Reason.DUPLICATE, Reason.OK, Reason.DUPLICATE]
    assert load(engine, target) == [Reason.OK] * 3
    assert page_data(target) == page_data(run)
