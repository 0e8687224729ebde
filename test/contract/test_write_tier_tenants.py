"""What ``TierEngine`` promises to tenants, over everything that keeps pages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from shared_tier import SharedTier

from kit.faulty import FaultyEngine
from kit.waiting import TIMEOUT_S, drained, finished
from sglang_tiered.storage.base import (
    NO_TENANT,
    Erasure,
    Health,
    LookupResult,
    Reason,
    Run,
    Stop,
    TenantUsage,
    TierEngine,
)
from sglang_tiered.storage.bucket import BucketEngine, BucketSettings
from sglang_tiered.storage.memory import MemoryEngine
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.stack import TierStack

if TYPE_CHECKING:
    from pathlib import Path

    from kit.runs import Blank, MakeRun, PageData

MakeEngine = Callable[..., TierEngine]

CAPACITY = 1 << 20
REGION = 64 * 1024
SHARE = CAPACITY // 4
A, B = b"a" * 16, b"b" * 16
PAGES = [8192] * 4


ENGINES = [
    "memory",
    "region-direct",
    "region-buffered",
    "faulty-without-faults",
    "object",
    "stack",
]


@pytest.fixture(params=ENGINES)
def make_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeEngine]:
    made: list[TierEngine] = []

    def make(max_tenant_bytes: int | None = None) -> TierEngine:
        engine: TierEngine
        if request.param == "memory":
            engine = MemoryEngine(CAPACITY, max_tenant_bytes=max_tenant_bytes)
        elif request.param == "faulty-without-faults":
            engine = FaultyEngine(MemoryEngine(CAPACITY, max_tenant_bytes=max_tenant_bytes))
        elif request.param == "object":
            settings = BucketSettings(
                url=f"memory://{tmp_path}",
                staging_bytes=64 << 20,
                capacity_bytes=CAPACITY,
                max_tenant_bytes=max_tenant_bytes,
                num_connections=2,
            )
            engine = BucketEngine(settings, namespace=b"\x11" * 32)
        else:
            directory = tmp_path / "store"
            directory.mkdir(mode=0o700)
            engine = RegionEngine(
                directory,
                namespace=b"\x11" * 32,
                capacity_bytes=CAPACITY,
                region_bytes=REGION,
                num_readers=2,
                max_tenant_bytes=max_tenant_bytes,
                device=FileDevice(
                    directory, direct=False if request.param == "region-buffered" else None
                ),
            )
            if request.param == "stack":
                engine = TierStack(engine, [SharedTier()])
        made.append(engine)
        return engine

    yield make
    for engine in made:
        assert drained(engine, TIMEOUT_S)
        engine.check_integrity()
        engine.close()


@pytest.fixture
def engine(make_engine: MakeEngine) -> TierEngine:
    return make_engine()


def of(tenant: bytes, run: Run) -> Run:
    return Run(run.keys, run.pages, tenant)


def hits(engine: TierEngine, run: Run) -> int:
    return engine.lookup(run.keys).num_hits


def usage(engine: TierEngine) -> dict[bytes, TenantUsage]:
    return {entry.tenant: entry for entry in engine.tenants(100)}


def test_a_tenant_of_wrong_length_raises(make_run: MakeRun) -> None:
    with pytest.raises(ValueError, match="a tenant has 3 bytes"):
        of(b"abc", make_run(1, PAGES))


def test_pages_count_for_the_tenant_that_stored_them(
    engine: TierEngine, make_run: MakeRun, blank: Blank
) -> None:
    runs = [of(A, make_run(1, PAGES)), of(B, make_run(2, [100, 5000])), make_run(3, [4096])]
    for run in runs:
        finished(engine.submit_store(run))
        finished(engine.submit_store(run))  # duplicates count once
        finished(engine.submit_load(blank(run)))
    found = usage(engine)
    assert {name: entry[1:3] for name, entry in found.items()} == {
        A: (4, 4 * 8192),
        B: (2, 5100),
        NO_TENANT: (1, 4096),
    }
    assert all(entry.physical_bytes >= entry.stored_bytes for entry in found.values())
    assert engine.stats().num_tenants == 3
    assert [entry.tenant for entry in engine.tenants(1)] == [A]


def test_purge_forgets_one_tenant_and_nothing_else(
    engine: TierEngine, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    mine, other, untenanted = (
        of(A, make_run(1, PAGES)),
        of(B, make_run(2, PAGES)),
        make_run(3, PAGES),
    )
    for run in (mine, other, untenanted):
        finished(engine.submit_store(run))
    assert is_true(engine.erase(Erasure(tenant=A)), TIMEOUT_S)
    assert engine.lookup(mine.keys) == LookupResult(0, Stop.MISS)
    assert finished(engine.submit_load(blank(mine))) == [Reason.MISS] * 4
    for run in (other, untenanted):
        target = blank(run)
        assert finished(engine.submit_load(target)) == [Reason.OK] * 4
        assert page_data(target) == page_data(run)
    stats = engine.stats()
    assert (stats.num_pages, stats.num_pages_erased, stats.num_tenants) == (8, 4, 2)
    assert stats.stored_bytes == 8 * 8192
    assert A not in {entry.tenant for entry in engine.tenants(9) if entry.num_pages}


def test_what_has_no_tenant_can_be_purged_too(engine: TierEngine, make_run: MakeRun) -> None:
    mine, untenanted = of(A, make_run(1, PAGES)), make_run(2, PAGES)
    for run in (mine, untenanted):
        finished(engine.submit_store(run))
    assert is_true(engine.erase(Erasure(tenant=NO_TENANT)), TIMEOUT_S)
    assert (hits(engine, mine), hits(engine, untenanted)) == (4, 0)


def test_a_purged_tenant_may_store_again(
    engine: TierEngine, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    run = of(A, make_run(1, PAGES))
    for _ in range(3):
        assert finished(engine.submit_store(run)) == [Reason.OK] * 4
        target = blank(run)
        assert finished(engine.submit_load(target)) == [Reason.OK] * 4
        assert page_data(target) == page_data(run)
        assert is_true(engine.erase(Erasure(tenant=A)), TIMEOUT_S)
        assert hits(engine, run) == 0


def test_a_purge_of_no_tenant_changes_nothing(engine: TierEngine, make_run: MakeRun) -> None:
    run = of(A, make_run(1, PAGES))
    finished(engine.submit_store(run))
    assert is_true(engine.erase(Erasure(tenant=B)), TIMEOUT_S)
    assert hits(engine, run) == 4
    assert engine.stats().num_pages_erased == 0


def test_clear_purges_every_tenant(engine: TierEngine, make_run: MakeRun) -> None:
    runs = [of(A, make_run(1, PAGES)), of(B, make_run(2, PAGES)), make_run(3, PAGES)]
    for run in runs:
        finished(engine.submit_store(run))
    assert is_true(engine.erase(Erasure()), TIMEOUT_S)
    assert [hits(engine, run) for run in runs] == [0, 0, 0]
    assert engine.tenants(9) == []
    assert engine.stats().num_tenants == 0
    assert engine.stats().num_pages_erased == 12


def test_a_closed_engine_promises_no_purge(engine: TierEngine) -> None:
    engine.close()
    assert not is_true(engine.erase(Erasure(tenant=A)), TIMEOUT_S)
    assert not is_true(engine.erase(Erasure()), TIMEOUT_S)


def test_no_earlier_store_lands_behind_a_purge(engine: TierEngine, make_run: MakeRun) -> None:
    stop = threading.Event()
    others: list[Run] = []

    def write() -> None:
        number = 100_000
        while not stop.is_set():
            run = of(B, make_run(number, [4096] * 2))
            if finished(engine.submit_store(run)) == [Reason.OK] * 2:
                others.append(run)
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for turn in range(15):
            runs = [of(A, make_run(100 * turn + i, PAGES)) for i in range(4)]
            jobs = [engine.submit_store(run) for run in runs]
            assert is_true(engine.erase(Erasure(tenant=A)), TIMEOUT_S)
            assert [hits(engine, run) for run in runs] == [0] * 4
            assert {reason for job in jobs for reason in finished(job)} <= {
                Reason.OK,
                Reason.CANCELLED,
            }
            assert [hits(engine, run) for run in runs] == [0] * 4
    finally:
        stop.set()
        thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert others
    assert hits(engine, others[-1]) == 2
    assert engine.stats().health is Health.RUNNING


def test_a_tenant_never_holds_more_than_its_share(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    engine = make_engine(SHARE)
    other = of(B, make_run(1, PAGES))
    finished(engine.submit_store(other))
    last: list[Run] = []
    for seed in range(100, 200):
        run = of(A, make_run(seed, PAGES))
        reasons = finished(engine.submit_store(run))
        assert set(reasons) <= {Reason.OK, Reason.OVER_SHARE}
        assert usage(engine)[A].physical_bytes <= SHARE
        last = [*last[-2:], run] if reasons == [Reason.OK] * 4 else last
    assert hits(engine, other) == 4, "another tenant's pages went for the share of one"
    assert [hits(engine, run) for run in last] == [4] * 3
    assert last[-1].keys[0] in {make_run(seed, PAGES).keys[0] for seed in range(190, 200)}, (
        "a tenant at its share stopped storing"
    )


def test_a_store_beyond_the_share_keeps_leading_pages(
    make_engine: MakeEngine, make_run: MakeRun
) -> None:
    engine = make_engine(16_384)
    run = of(A, make_run(1, [8192, 4096, 8192, 8192]))
    reasons = finished(engine.submit_store(run))
    assert reasons.count(Reason.OVER_SHARE) >= 1 or isinstance(engine, MemoryEngine | FaultyEngine)
    assert usage(engine)[A].physical_bytes <= 16_384
    assert finished(engine.submit_store(of(A, make_run(2, [16_385])))) == [Reason.OVER_SHARE]


def test_stores_of_no_tenant_have_no_share(make_engine: MakeEngine, make_run: MakeRun) -> None:
    engine = make_engine(SHARE)
    runs = [make_run(seed, PAGES) for seed in range(12)]  # a share and a half
    for run in runs:
        assert finished(engine.submit_store(run)) == [Reason.OK] * 4
    assert [hits(engine, run) for run in runs] == [4] * 12
