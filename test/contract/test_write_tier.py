"""What ``TierEngine`` promises of stores, and to tenants, over everything that keeps pages."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from kit.memory import MemoryEngine
from kit.runs import MakeRun, blank, make_run, of, page_data, select
from kit.stores import damage
from kit.tiers import KEEPING, close_whole, loads, open_tier
from kit.waiting import TIMEOUT_S, finished
from sglang_tiered.storage.base import (
    NO_TENANT,
    Erasure,
    Health,
    JobKind,
    LookupResult,
    Reason,
    Run,
    Stop,
    TenantUsage,
    TierEngine,
)
from sglang_tiered.storage.bucket import BucketEngine
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.stack import TierStack

MakeEngine = Callable[..., TierEngine]

CAPACITY = 1 << 20
QUEUE = 512 * 1024  # of stores, where an engine has one
SHARE = CAPACITY // 4
A, B = b"a" * 16, b"b" * 16
PAGES = [8192] * 4


@pytest.fixture(params=KEEPING)
def make_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeEngine]:
    with ExitStack() as opened:

        def make(max_tenant_bytes: int | None = None, **sizes: int) -> TierEngine:
            bounds = {"capacity_bytes": CAPACITY, "region_bytes": 64 << 10} | sizes
            engine = open_tier(request.param, tmp_path, max_tenant_bytes=max_tenant_bytes, **bounds)
            opened.callback(close_whole, engine)
            return engine

        yield make


@pytest.fixture
def engine(make_engine: MakeEngine) -> TierEngine:
    return make_engine(region_bytes=256 << 10, queue_bytes=QUEUE)


def store(engine: TierEngine, run: Run) -> list[Reason]:
    return finished(engine.submit_store(run))


def load(engine: TierEngine, run: Run) -> list[Reason]:
    return finished(engine.submit_load(run))


def test_a_page_beyond_the_tier_has_no_space(engine: TierEngine, make_run: MakeRun) -> None:
    run = make_run(8, [100, CAPACITY + 1])
    assert store(engine, run) == [Reason.OK, Reason.NO_SPACE]


def test_a_store_beyond_the_queue_goes_in_parts(engine: TierEngine, make_run: MakeRun) -> None:
    run = rest = make_run(17, [16_384] * 40)
    assert QUEUE < run.num_bytes < CAPACITY
    while rest.num_pages:
        finished(job := engine.submit_store(rest))
        num_taken = job.num_leading_ok
        assert num_taken, f"the last {rest.num_pages} of {run.num_pages} pages are never taken"
        rest = select(rest, list(range(num_taken, rest.num_pages)))
    assert engine.lookup(run.keys) == LookupResult(run.num_pages, Stop.END)
    loads(engine, run)


def test_a_full_queue_drops_from_the_end(engine: TierEngine, make_run: MakeRun) -> None:
    runs = [make_run(seed, [16_384] * 40) for seed in range(300, 304)]
    outcomes: Counter[tuple[JobKind, Reason]] = Counter()
    for number, job in enumerate([engine.submit_store(run) for run in runs]):
        reasons = finished(job)
        num_taken = job.num_leading_ok
        assert num_taken or number, "nothing was queued, and not one page was taken"
        assert reasons[num_taken:] == [Reason.REJECTED] * (job.run.num_pages - num_taken)
        outcomes.update((JobKind.STORE, reason) for reason in reasons)
    stats = engine.stats()
    assert stats.reasons == outcomes
    assert stats.num_pages_stored == outcomes[JobKind.STORE, Reason.OK]
    assert stats.queued_store_bytes == 0


def test_eviction_holds_the_cap_and_forgets_the_oldest(
    engine: TierEngine, make_run: MakeRun
) -> None:
    runs = [make_run(seed, [16_384] * 8) for seed in range(100, 130)]
    for run in runs:
        assert set(store(engine, run)) == {Reason.OK}
        stats = engine.stats()
        assert stats.physical_bytes <= stats.capacity_bytes
    assert engine.lookup(runs[0].keys).num_hits == 0
    assert engine.lookup(runs[-1].keys).num_hits == 8
    assert engine.stats().num_pages_evicted > 0
    loads(engine, runs[-1])


def test_the_store_lets_go_of_the_buffers(engine: TierEngine, make_run: MakeRun) -> None:
    original = make_run(9, [4096, 4097])
    buffers = [bytearray(page) for page in page_data(original)]
    store(engine, Run(original.keys, tuple((memoryview(buffer),) for buffer in buffers)))
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    loads(engine, original)


def test_cancelled_store_still_finishes(engine: TierEngine, make_run: MakeRun) -> None:
    run = make_run(11, [65_536] * 8)
    job = engine.submit_store(run)
    job.cancel()
    finished(job)
    assert set(job.reasons) <= {Reason.OK, Reason.CANCELLED}
    assert engine.lookup(run.keys).num_hits == job.num_leading_ok


def test_visible_only_when_readable(engine: TierEngine, make_run: MakeRun) -> None:
    runs = [make_run(seed, [4096] * 4) for seed in range(200, 230)]
    submitted = threading.Event()

    def read() -> None:
        for run in runs:
            while engine.lookup(run.keys).num_hits < run.num_pages and not submitted.is_set():
                pass
            loads(engine, select(run, range(engine.lookup(run.keys).num_hits)))

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read)
        for run in runs:
            store(engine, run)
        submitted.set()
        reading.result(TIMEOUT_S)


def test_concurrent_stores_and_loads(engine: TierEngine, make_run: MakeRun) -> None:
    def work(worker: int) -> None:
        for step in range(15):
            run = make_run(1000 * (worker % 2) + step, [8192, 100, (5000, 5000)] * 3)
            store(engine, run)
            target = blank(run)
            reasons = load(engine, target)
            assert set(reasons) <= {Reason.OK, Reason.MISS}
            for reason, got, wanted in zip(reasons, page_data(target), page_data(run), strict=True):
                assert reason is Reason.MISS or got == wanted, (worker, step)

    with ThreadPoolExecutor(4) as threads:
        for _ in threads.map(work, range(4)):
            pass


def test_the_books_balance(engine: TierEngine, make_run: MakeRun) -> None:
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
        # What no tier holds no tier is asked for.
        **({} if isinstance(engine, TierStack) else {(JobKind.LOAD, Reason.MISS): 1}),
    }
    num_stored = as_stored(engine, run).num_bytes
    assert (stats.num_pages, stats.stored_bytes) == (3, num_stored)
    assert (stats.num_pages_stored, stats.bytes_stored) == (3, run.num_bytes)
    assert (stats.num_pages_loaded, stats.bytes_loaded) == (3, run.num_bytes)
    assert stats.bytes_written >= num_stored
    assert stats.num_inflight_jobs == 0
    assert stats.health is Health.RUNNING
    assert stats.store_durations.count == 1, "a store that made nothing durable counts"
    assert 0.0 < stats.store_durations.sum_s < TIMEOUT_S


def keeper(engine: TierEngine) -> TierEngine:
    return engine.nvme if isinstance(engine, TierStack) else engine


def as_stored(engine: TierEngine, run: Run) -> Run:
    """A run of what the tier makes of these pages."""
    nvme = keeper(engine)
    encoding = nvme.encoding if isinstance(nvme, RegionEngine) else None
    if encoding is None:
        return run
    return Run(run.keys, tuple(encoding.encode(page) for page in run.pages), run.tenant)


def flip(engine: TierEngine, directory: Path, data: bytes) -> None:
    """Flip a bit of the stored copy of ``data``, behind the engine's back."""
    changed = bytes([data[0] ^ 1]) + data[1:]
    if isinstance(engine, MemoryEngine):
        for page in engine._pages.values():
            page.data[:] = page.data.replace(data, changed)
    elif isinstance(engine, BucketEngine):
        client, folder = engine._requests, engine._state.layout.pages
        for each in [entry for chunk in client.listing(folder) for entry in chunk]:
            stored = bytes(client.get(each.path, each.size))
            if data in stored:
                client.put(each.path, stored.replace(data, changed))
    damage(directory, data)


def test_a_flipped_bit_is_corrupt_then_a_miss(
    engine: TierEngine, tmp_path: Path, make_run: MakeRun
) -> None:
    run = make_run(16, [4096, 4096, 4096])
    store(engine, run)
    flip(engine, tmp_path / "store", page_data(as_stored(engine, run))[1])
    target = blank(run)
    assert load(engine, target) == [Reason.OK, Reason.CORRUPT, Reason.OK]
    assert load(engine, blank(run)) == [Reason.OK, Reason.MISS, Reason.OK]
    assert engine.lookup(run.keys).num_hits == 1
    assert store(engine, run) == [Reason.DUPLICATE, Reason.OK, Reason.DUPLICATE]
    assert load(engine, target) == [Reason.OK] * 3
    assert page_data(target) == page_data(run)


# ---- Tenants ----


def usage(engine: TierEngine) -> dict[bytes, TenantUsage]:
    if isinstance(engine, BucketEngine):  # NVMe answers for a server, and is asked alone
        shares = engine._state.index._tenants.values()
        books = [TenantUsage(s.tenant, s.num_pages, s.num_bytes, s.num_bytes) for s in shares]
        return {each.tenant: each for each in books}
    return {entry.tenant: entry for entry in keeper(engine).tenants(100)}


def test_pages_count_for_the_tenant_that_stored_them(engine: TierEngine, make_run: MakeRun) -> None:
    runs = [of(A, make_run(1, PAGES)), of(B, make_run(2, [100, 5000])), make_run(3, [4096])]
    for run in runs:
        store(engine, run)
        store(engine, run)  # duplicates count once
        load(engine, blank(run))
    found = usage(engine)
    num_bytes = [as_stored(engine, run).num_bytes for run in runs]
    assert {name: entry[1:3] for name, entry in found.items()} == {
        A: (4, num_bytes[0]),
        B: (2, num_bytes[1]),
        NO_TENANT: (1, num_bytes[2]),
    }
    assert all(entry.physical_bytes >= entry.stored_bytes for entry in found.values())
    assert engine.stats().num_tenants == 3
    assert [entry.tenant for entry in keeper(engine).tenants(1)] in ([A], [])


ERASED = {
    "tenant": Erasure(tenant=A),
    "no tenant": Erasure(tenant=NO_TENANT),
    "stranger": Erasure(tenant=A[:-1] + b"b"),
    "everything": Erasure(),
    "pages": Erasure.of(make_run(2, PAGES).keys[:2]),
    "nothing": Erasure(()),
}


@pytest.mark.parametrize("what", ERASED.values(), ids=ERASED)
def test_an_erasure_takes_what_it_names_alone(make_engine: MakeEngine, what: Erasure) -> None:
    """And it may be stored again."""
    engine = make_engine()
    runs = [of(A, make_run(1, PAGES)), of(B, make_run(2, PAGES)), make_run(3, PAGES)]
    for run in runs:
        assert store(engine, run) == [Reason.OK] * 4
    assert is_true(engine.erase(what), TIMEOUT_S)
    num_left = 0
    for run in runs:
        is_meant = what.keys is None and what.tenant in (None, run.tenant)
        gone = run.keys if is_meant else set(what.keys or ())
        held = [key not in gone for key in run.keys]
        num_left += sum(held)
        assert engine.contains(run.keys) == held
        loaded = load(engine, blank(run))
        assert loaded == [Reason.OK if is_held else Reason.MISS for is_held in held]
    stats = engine.stats()
    assert (stats.num_pages, stats.num_pages_erased) == (num_left, 12 - num_left)
    assert stats.stored_bytes == num_left * 8192
    assert sum(entry.num_pages for entry in usage(engine).values()) == num_left
    for run in runs:
        assert set(store(engine, run)) <= {Reason.OK, Reason.DUPLICATE}
        loads(engine, run)


def test_no_earlier_store_lands_behind_an_erasure(engine: TierEngine) -> None:
    stop = threading.Event()
    others: list[Run] = []

    def write() -> None:
        number = 100_000
        while not stop.is_set():
            run = of(B, make_run(number, [4096] * 2))
            if store(engine, run) == [Reason.OK] * 2:
                others.append(run)
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for turn in range(15):
            runs = [of(A, make_run(100 * turn + i, PAGES)) for i in range(4)]
            jobs = [engine.submit_store(run) for run in runs]
            assert is_true(engine.erase(Erasure(tenant=A)), TIMEOUT_S)
            assert not any(engine.contains([key for run in runs for key in run.keys]))
            assert {reason for job in jobs for reason in finished(job)} <= {
                Reason.OK,
                Reason.CANCELLED,
            }
            assert not any(engine.contains([key for run in runs for key in run.keys]))
    finally:
        stop.set()
        thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert others
    assert engine.lookup(others[-1].keys).num_hits == 2
    assert engine.stats().health is Health.RUNNING


def test_a_tenant_never_holds_more_than_its_share(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    engine = make_engine(SHARE)
    other = of(B, make_run(1, PAGES))
    store(engine, other)
    last: list[Run] = []
    for seed in range(100, 200):
        run = of(A, make_run(seed, PAGES))
        reasons = store(engine, run)
        assert set(reasons) <= {Reason.OK, Reason.OVER_SHARE}
        assert usage(engine)[A].physical_bytes <= SHARE
        last = [*last[-2:], run] if reasons == [Reason.OK] * 4 else last
    loads(engine, other)  # not gone for the share of another
    loads(engine, *last)
    assert last[-1].keys[0] in {make_run(seed, PAGES).keys[0] for seed in range(190, 200)}, (
        "a tenant at its share stopped storing"
    )


def test_a_store_beyond_the_share_keeps_leading_pages(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    engine = make_engine(16_384)
    run = of(A, make_run(1, [8192, 4096, 8192, 8192]))
    reasons = store(engine, run)
    assert reasons.count(Reason.OVER_SHARE) >= 1 or isinstance(engine, MemoryEngine)
    assert usage(engine)[A].physical_bytes <= 16_384
    assert finished(engine.submit_store(of(A, make_run(2, [16_385])))) == [Reason.OVER_SHARE]


def test_stores_of_no_tenant_have_no_share(make_engine: MakeEngine, make_run: MakeRun) -> None:
    engine = make_engine(SHARE)
    runs = [make_run(seed, PAGES) for seed in range(12)]  # a share and a half
    for run in runs:
        assert store(engine, run) == [Reason.OK] * 4
    loads(engine, *runs)
