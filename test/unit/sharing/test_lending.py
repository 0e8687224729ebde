"""Pages of a store that another process has open: what it gives, and what it must not give."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.runs import blank, make_run, page_data
from kit.tiers import open_region, store
from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.sharing.lending import BorrowedEngine, PageLender
from sglang_tiered.storage.base import Erasure, Health, Job, JobKind, Reason, Run, Stop
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region.format import LENDING_NAME

REGION = 4 << 20
OK, MISS = Reason.OK, Reason.MISS


class World:
    """A store, whose loads may be held, its lender, and a borrower."""

    def __init__(self, directory: Path) -> None:
        # Deeper than the address of a socket may be long.
        self.shard = directory / ("deep" * 30) / "shard"
        self.owner = open_region(self.shard, capacity_bytes=4 * REGION, region_bytes=REGION)
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.let_go.set()
        self.generation = 0
        self.borrowers: list[BorrowedEngine] = []
        self.borrower = self.borrow()

    def submit(self, run: Run) -> Job:
        job = Job(JobKind.LOAD, run)
        threading.Thread(target=self._load, args=(job,), daemon=True).start()
        return job

    def _load(self, job: Job) -> None:
        self.begun.set()
        assert self.let_go.wait(TIMEOUT_S)
        job.reasons = finished(self.owner.submit_load(job.run))
        job.finish()

    def lend(self) -> PageLender:
        lender = PageLender(self.shard, self.submit, lambda: self.generation)
        lender.set_claim(b"model")
        return lender

    def borrow(self, **options: Any) -> BorrowedEngine:
        borrower = BorrowedEngine(**options)
        borrower.open(self.shard)
        borrower.claim = b"model"
        self.borrowers.append(borrower)
        return borrower

    def stored(self, seed: int, *sizes: int | tuple[int, ...]) -> Run:
        run = make_run(seed, sizes or [100])
        store(self.owner, run)
        return run

    def ask(self, run: Run) -> Job:
        return self.borrower.submit_load(blank(run))

    def ask_held(self, run: Run) -> Job:
        """Ask for pages whose read does not end before ``let_go``."""
        self.let_go.clear()
        job = self.ask(run)
        assert self.begun.wait(TIMEOUT_S)
        return job


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.let_go.set()
    for borrower in made.borrowers:
        borrower.close()
        borrower.check_integrity()
    made.owner.close()


@pytest.fixture
def lender(world: World) -> Iterator[PageLender]:
    made = world.lend()
    yield made
    world.let_go.set()
    made.close()


@pytest.mark.parametrize("piece_bytes", [1, 9_000, 4 << 20])
def test_another_process_loads_in_pieces_of_any_size(
    world: World, lender: PageLender, piece_bytes: int
) -> None:
    client: Any = world.borrower._client
    client._settings = dataclasses.replace(client._settings, request_bytes=piece_bytes)
    stored, missing = world.stored(1, 100, (4096, 50), 9000, (1,) * 600), make_run(2, [100])
    keys, pages = stored.keys, stored.pages
    run = Run((*keys[:2], *missing.keys, *keys[2:]), (*pages[:2], *missing.pages, *pages[2:]))
    for _ in range(2):  # over one connection
        job = world.ask(run)
        assert finished(job) == [OK, OK, MISS, OK, OK]
        data = page_data(job.run)
        assert data[:2] + data[3:] == page_data(stored)
        assert data[2] == b"\xa5" * 100
    assert world.owner.stats().num_pages_loaded == 8, "which counts them, for all ranks together"


@pytest.mark.parametrize("claim", [None, b"another model"])
def test_pages_of_another_claim_are_not_given(
    world: World, lender: PageLender, claim: bytes | None
) -> None:
    run, borrower = world.stored(1), world.borrower
    lender.set_claim(claim)
    assert finished(world.ask(run)) == [MISS]
    borrower.claim = claim
    lender.set_claim(b"model")
    assert finished(world.ask(run)) == [MISS]
    assert borrower.lookup(run.keys).num_hits == (0 if claim is None else 1)
    borrower.claim = b"model"
    assert finished(world.ask(run)) == [OK]
    assert is_true(world.owner.erase(Erasure()), TIMEOUT_S)
    assert finished(world.ask(run)) == [MISS], "the lender lost it"


def test_pages_read_while_the_claim_changes_are_withheld(world: World, lender: PageLender) -> None:
    job = world.ask_held(world.stored(1))
    lender.set_claim(b"after an update")
    world.let_go.set()
    assert finished(job) == [MISS]


def test_a_page_purged_on_its_way_is_cancelled(world: World, lender: PageLender) -> None:
    job = world.ask_held(world.stored(1))
    assert world.borrower.erase(Erasure()).result(0)
    world.let_go.set()
    assert finished(job) == [Reason.CANCELLED]


def test_a_closing_borrower_awaits_no_disk(world: World, lender: PageLender) -> None:
    job = world.ask_held(make_run(1, [100]))
    world.borrower.close()
    assert finished(job) == [Reason.CANCELLED]
    assert finished(world.ask(make_run(1, [100]))) == [Reason.CANCELLED]


def test_a_dead_lender_is_misses_until_the_next(world: World) -> None:
    """Its process is killed in the middle of an answer, and the socket stays behind."""
    now = 100.0
    world.borrower = borrower = world.borrow(clock=lambda: now)
    run = world.stored(1)
    world.let_go.clear()
    lends, told = os.pipe()
    process = os.fork()
    if process == 0:  # is killed with the question unanswered
        _ = world.lend()
        os.write(told, b"!")  # asked before, it would not have the claim yet
        world.begun.wait(TIMEOUT_S)
        os.kill(os.getpid(), signal.SIGKILL)
    os.read(lends, 1)
    assert finished(world.ask(run)) == [Reason.IO_ERROR]
    os.waitpid(process, 0)
    assert (world.shard / LENDING_NAME).exists()
    assert borrower.stats().health is Health.MISS_ONLY
    assert borrower.lookup(run.keys) == (0, Stop.UNHEALTHY)

    world.let_go.set()
    lender = world.lend()
    now += 1.0
    assert borrower.lookup(run.keys) == (1, Stop.END)
    assert finished(world.ask(run)) == [OK]
    lender.close()


def test_the_socket_is_the_users_and_goes(world: World) -> None:
    """That of another server stays, whose shard has by now the name of this one, which was
    moved."""
    lender, socket = world.lend(), world.shard / LENDING_NAME
    assert socket.stat().st_mode & 0o777 == 0o600
    world.shard.rename(world.shard.parent / "moved")
    world.shard.mkdir()
    others = world.lend()
    lender.close()
    assert socket.exists()
    others.close()
    assert not socket.exists()


def test_one_read_serves_all_ranks_that_ask(world: World, lender: PageLender) -> None:
    """The rank that lends among them."""
    run = world.stored(1, 5000, 100)
    world.let_go.clear()
    jobs = [lender.load(blank(run), world.submit)]
    jobs += [each.submit_load(blank(run)) for each in (world.borrower, world.borrow())]
    eventually(lambda: sum(r.num_readers for r in lender._source._reads.values()) == 2)
    world.let_go.set()
    for job in jobs:
        assert finished(job) == [OK] * 2
        assert page_data(job.run) == page_data(run)
    assert world.owner.stats().num_pages_loaded == 2
    eventually(lambda: not lender._source._reads)


def test_load_that_cannot_begin_leaves_nobody_waiting(world: World, lender: PageLender) -> None:
    joined = []

    def refuses(wanted: Run) -> Job:
        joined.append(world.ask(wanted))
        eventually(lambda: bool(lender._source._reads))
        raise RuntimeError("closed")

    with pytest.raises(RuntimeError, match="closed"):
        lender.load(blank(make_run(1, [100])), refuses)
    assert finished(joined[0]) == [MISS]


def test_own_load_ends_whatever_its_lender_does(world: World, lender: PageLender) -> None:
    """Of its pages one is missing, for whoever joined it, and it is closed meanwhile."""
    run, gone = world.stored(1), make_run(2, [100])
    both = Run(run.keys + gone.keys, run.pages + gone.pages)
    for is_closed in (False, True):
        world.let_go.clear()
        own = lender.load(blank(both), world.submit)
        job = world.ask(both)
        eventually(lambda: bool(lender._source._reads))
        late = lender.load(blank(run), world.submit)
        if is_closed:
            lender.close()
        world.let_go.set()
        assert finished(own) == [OK, MISS] and finished(late) == [OK]
        assert finished(job) == ([Reason.IO_ERROR] * 2 if is_closed else [OK, MISS])
        eventually(lambda is_closed=is_closed: is_closed or not lender._source._reads)


@pytest.mark.parametrize("is_own", [False, True])
def test_who_asks_after_an_erasure_joins_nothing(
    world: World, lender: PageLender, is_own: bool
) -> None:
    """Neither a read for another, nor a load of the process that lends: its pages may be those that
    were erased."""
    run = world.stored(1)
    world.let_go.clear()
    before = lender.load(blank(run), world.submit) if is_own else world.ask(run)
    assert world.begun.wait(TIMEOUT_S)
    world.begun.clear()
    world.generation += 1
    after = world.borrow().submit_load(blank(run))
    assert world.begun.wait(TIMEOUT_S), "it waits for what began before"
    world.let_go.set()
    assert finished(before) == finished(after) == [OK]
