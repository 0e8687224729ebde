"""Pages of a store that another process has open: what it gives, and what it must not give."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kit.runs import NAMESPACE, Blank, MakeRun, PageData
from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.sharing.borrowing import BorrowedEngine
from sglang_tiered.sharing.lending import PageLender
from sglang_tiered.storage.base import Erasure, Health, Job, JobKind, Reason, Run, Stop
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.files import LENDING_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


REGION = 4 << 20


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[RegionEngine]:
    # Deeper than the address of a socket may be long.
    shard = tmp_path / ("deep" * 30) / "shard"
    engine = RegionEngine(
        shard, namespace=NAMESPACE, capacity_bytes=4 * REGION, region_bytes=REGION
    )
    yield engine
    engine.close()


@pytest.fixture
def lending(owner: RegionEngine) -> Iterator[PageLender]:
    lends = PageLender(owner.directory, owner.submit_load)
    lends.claim = b"model"
    yield lends
    lends.close()


@pytest.fixture
def borrower(owner: RegionEngine) -> Iterator[BorrowedEngine]:
    engine = BorrowedEngine()
    engine.open(owner.directory)
    engine.claim = b"model"
    yield engine
    engine.close()
    engine.check_integrity()


def store(engine: RegionEngine, run: Run) -> None:
    assert set(finished(engine.submit_store(run))) == {Reason.OK}


@pytest.mark.parametrize("piece_bytes", [1, 9_000, 4 << 20])
def test_another_process_loads_in_pieces_of_any_size(
    owner: RegionEngine,
    lending: PageLender,
    borrower: BorrowedEngine,
    make_run: MakeRun,
    blank: Blank,
    page_data: PageData,
    piece_bytes: int,
) -> None:
    client: Any = borrower._lender[1]
    client._settings = dataclasses.replace(client._settings, request_bytes=piece_bytes)
    stored, missing = make_run(1, [100, (4096, 50), 9000, (1,) * 600]), make_run(2, [100])
    store(owner, stored)
    keys, pages = stored.keys, stored.pages
    run = Run((*keys[:2], *missing.keys, *keys[2:]), (*pages[:2], *missing.pages, *pages[2:]))
    for _ in range(2):  # over one connection
        target = blank(run)
        ok, miss = Reason.OK, Reason.MISS
        assert finished(borrower.submit_load(target)) == [ok, ok, miss, ok, ok]
        data = page_data(target)
        assert data[:2] + data[3:] == page_data(stored)
        assert data[2] == b"\xa5" * 100
    assert owner.stats().num_pages_loaded == 8, "which counts them, for all ranks together"


def test_a_borrower_holds_every_key_and_stores_nothing(
    owner: RegionEngine, lending: PageLender, borrower: BorrowedEngine, make_run: MakeRun
) -> None:
    run = make_run(1, [100, 200])
    assert borrower.lookup(run.keys) == (2, Stop.END)
    assert borrower.contains(run.keys) == [True, True]
    assert finished(borrower.submit_store(run)) == [Reason.DUPLICATE] * 2
    assert owner.lookup(run.keys) == (0, Stop.MISS)
    assert owner.stats().bytes_written == 0


def test_a_page_the_lender_lost_is_a_miss(
    owner: RegionEngine,
    lending: PageLender,
    borrower: BorrowedEngine,
    make_run: MakeRun,
    blank: Blank,
) -> None:
    run = make_run(1, [100])
    store(owner, run)
    assert is_true(owner.erase(Erasure()), TIMEOUT_S)
    assert finished(borrower.submit_load(blank(run))) == [Reason.MISS]


@pytest.mark.parametrize("claim", [None, b"another model"])
def test_pages_of_another_claim_are_not_given(
    owner: RegionEngine,
    lending: PageLender,
    borrower: BorrowedEngine,
    make_run: MakeRun,
    blank: Blank,
    claim: bytes | None,
) -> None:
    run = make_run(1, [100])
    store(owner, run)
    lending.claim = claim
    assert finished(borrower.submit_load(blank(run))) == [Reason.MISS]
    borrower.claim, lending.claim = claim, b"model"
    assert finished(borrower.submit_load(blank(run))) == [Reason.MISS]
    assert borrower.lookup(run.keys).num_hits == (0 if claim is None else 1)
    borrower.claim = b"model"
    assert finished(borrower.submit_load(blank(run))) == [Reason.OK]


class HeldEngine:
    """Loads that end when they are told to."""

    def __init__(self, engine: RegionEngine) -> None:
        self._engine = engine
        self.begun, self.let_go = threading.Event(), threading.Event()

    def submit(self, run: Run) -> Job:
        job = Job(JobKind.LOAD, run)
        threading.Thread(target=self._load, args=(job,), daemon=True).start()
        return job

    def _load(self, job: Job) -> None:
        self.begun.set()
        assert self.let_go.wait(TIMEOUT_S)
        job.reasons = finished(self._engine.submit_load(job.run))
        job.finish()


@pytest.fixture
def held(owner: RegionEngine) -> Iterator[tuple[HeldEngine, PageLender]]:
    engine = HeldEngine(owner)
    lends = PageLender(owner.directory, engine.submit)
    lends.claim = b"model"
    yield engine, lends
    engine.let_go.set()
    lends.close()


def test_pages_read_while_the_claim_changes_are_withheld(
    owner: RegionEngine,
    held: tuple[HeldEngine, PageLender],
    borrower: BorrowedEngine,
    make_run: MakeRun,
    blank: Blank,
) -> None:
    engine, lends = held
    run = make_run(1, [100])
    store(owner, run)
    job = borrower.submit_load(blank(run))
    assert engine.begun.wait(TIMEOUT_S)
    lends.claim = b"after an update"
    engine.let_go.set()
    assert finished(job) == [Reason.MISS]


def test_a_page_purged_on_its_way_is_cancelled(
    owner: RegionEngine,
    held: tuple[HeldEngine, PageLender],
    borrower: BorrowedEngine,
    make_run: MakeRun,
    blank: Blank,
) -> None:
    engine, _ = held
    run = make_run(1, [100])
    store(owner, run)
    job = borrower.submit_load(blank(run))
    assert engine.begun.wait(TIMEOUT_S)
    purge = borrower.erase(Erasure())
    assert purge.done() and purge.result()
    engine.let_go.set()
    assert finished(job) == [Reason.CANCELLED]


def test_a_closing_borrower_awaits_no_disk(
    held: tuple[HeldEngine, PageLender], borrower: BorrowedEngine, make_run: MakeRun, blank: Blank
) -> None:
    engine, _ = held
    job = borrower.submit_load(blank(make_run(1, [100])))
    assert engine.begun.wait(TIMEOUT_S)
    borrower.close()
    assert finished(job) == [Reason.MISS]
    assert finished(borrower.submit_load(blank(make_run(1, [100])))) == [Reason.CANCELLED]


def test_a_dead_lender_is_misses_until_the_next(
    owner: RegionEngine, make_run: MakeRun, blank: Blank
) -> None:
    """Its process is killed in the middle of an answer, and the socket stays behind."""
    now = 100.0
    borrower = BorrowedEngine(clock=lambda: now)
    borrower.open(owner.directory)
    borrower.claim = b"model"
    run = make_run(1, [100])
    store(owner, run)
    process = os.fork()
    if process == 0:  # listens, and is killed with the question unanswered
        held = HeldEngine(owner)
        first = PageLender(owner.directory, held.submit)
        first.claim = b"model"
        held.begun.wait(TIMEOUT_S)
        os.kill(os.getpid(), signal.SIGKILL)
    eventually((owner.directory / LENDING_NAME).exists)
    assert finished(borrower.submit_load(blank(run))) == [Reason.MISS]
    os.waitpid(process, 0)
    assert (owner.directory / LENDING_NAME).exists()
    assert borrower.stats().health is Health.MISS_ONLY
    assert borrower.lookup(run.keys) == (0, Stop.UNHEALTHY)

    lends = PageLender(owner.directory, owner.submit_load)
    lends.claim = b"model"
    now += 1.0
    assert borrower.lookup(run.keys) == (1, Stop.END)
    assert finished(borrower.submit_load(blank(run))) == [Reason.OK]
    lends.close()
    borrower.close()


def test_only_the_servers_user_can_ask(lending: PageLender, owner: RegionEngine) -> None:
    assert (owner.directory / "LENDING").stat().st_mode & 0o777 == 0o600
    lending.close()
    assert not (owner.directory / "LENDING").exists()


def test_closing_leaves_the_socket_of_others(owner: RegionEngine) -> None:
    """The shard was moved, and another server has one of the same name by now."""
    lends = PageLender(owner.directory, owner.submit_load)
    owner.directory.rename(owner.directory.parent / "moved")
    owner.directory.mkdir()
    others = PageLender(owner.directory, owner.submit_load)
    lends.close()
    assert (owner.directory / LENDING_NAME).exists()
    others.close()
    assert not (owner.directory / LENDING_NAME).exists()


@pytest.mark.parametrize("lender_loads", [False, True])
def test_one_read_serves_all_ranks_that_ask(
    owner: RegionEngine,
    held: tuple[HeldEngine, PageLender],
    make_run: MakeRun,
    blank: Blank,
    page_data: PageData,
    lender_loads: bool,
) -> None:
    """The rank that lends among them."""
    engine, lends = held
    run = make_run(1, [5000, 100])
    store(owner, run)
    borrowers, jobs = [BorrowedEngine() for _ in range(3)], []
    if lender_loads:
        jobs.append(lends.load(blank(run), engine.submit))
    for one in borrowers:
        one.open(owner.directory)
        one.claim = b"model"
        jobs.append(one.submit_load(blank(run)))
    eventually(lambda: sum(r.num_readers for r in lends._source._reads.values()) == 3)
    engine.let_go.set()
    for job in jobs:
        assert finished(job) == [Reason.OK] * 2
        assert page_data(job.run) == page_data(run)
    assert owner.stats().num_pages_loaded == 2
    for one in borrowers:
        one.close()
    eventually(lambda: not lends._source._reads)
    assert not lends._source._owns


def test_own_load_ends_whatever_its_lender_does(
    owner: RegionEngine,
    held: tuple[HeldEngine, PageLender],
    borrower: BorrowedEngine,
    make_run: MakeRun,
    blank: Blank,
) -> None:
    """Of its pages one is missing, for whoever joined it, and it is closed meanwhile."""
    engine, lends = held
    run, gone = make_run(1, [100]), make_run(2, [100])
    store(owner, run)
    both = Run(run.keys + gone.keys, run.pages + gone.pages)
    own = lends.load(blank(both), engine.submit)
    job = borrower.submit_load(blank(both))
    eventually(lambda: bool(lends._source._reads))
    late = lends.load(blank(run), engine.submit)
    engine.let_go.set()
    assert finished(own) == finished(job) == [Reason.OK, Reason.MISS]
    assert finished(late) == [Reason.OK]
    engine.let_go.clear()
    own = lends.load(blank(both), engine.submit)
    job = borrower.submit_load(blank(both))
    eventually(lambda: bool(lends._source._reads))
    lends.close()
    engine.let_go.set()
    assert finished(own) == [Reason.OK, Reason.MISS]
    assert set(finished(job)) == {Reason.MISS}


def test_load_that_cannot_begin_leaves_nobody_waiting(
    held: tuple[HeldEngine, PageLender],
    borrower: BorrowedEngine,
    make_run: MakeRun,
    blank: Blank,
) -> None:
    _, lends = held
    run, joined = make_run(1, [100]), []

    def refuses(wanted: Run) -> Job:
        joined.append(borrower.submit_load(blank(wanted)))
        eventually(lambda: bool(lends._source._reads))
        raise RuntimeError("closed")

    with pytest.raises(RuntimeError, match="closed"):
        lends.load(blank(run), refuses)
    assert finished(joined[0]) == [Reason.MISS] and not lends._source._owns


def test_who_asks_after_an_erasure_joins_no_read(
    owner: RegionEngine, make_run: MakeRun, blank: Blank
) -> None:
    generation = [0]
    engine = HeldEngine(owner)
    lends = PageLender(owner.directory, engine.submit, lambda: generation[0])
    lends.claim = b"model"
    run = make_run(1, [100])
    store(owner, run)
    borrowers = [BorrowedEngine() for _ in range(2)]
    for one in borrowers:
        one.open(owner.directory)
        one.claim = b"model"
    before = borrowers[0].submit_load(blank(run))
    assert engine.begun.wait(TIMEOUT_S)
    generation[0] += 1
    after = borrowers[1].submit_load(blank(run))
    eventually(lambda: len(lends._source._reads) == 2)
    engine.let_go.set()
    assert finished(before) == finished(after) == [Reason.OK]
    for one in borrowers:
        one.close()
    lends.close()
