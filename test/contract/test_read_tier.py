"""What ``TierEngine`` promises of lookups, loads and purges, over all that pages are read from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from erasing_servers import Servers
from peer_servers import know_each_other
from shared_tier import SharedTier

from kit.runs import MakeRun, blank, page_data, select
from kit.tiers import KEEPING, close_whole, loads, open_region, open_tier
from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.sharing.lending import BorrowedEngine, PageLender
from sglang_tiered.sharing.peer_tier import PeerTier
from sglang_tiered.storage.base import (
    Erasure,
    Health,
    LookupResult,
    Reason,
    Run,
    Stop,
    Tier,
    TierEngine,
)
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.storage.stack import TierStack

pytestmark = pytest.mark.timeout(60)

SIZES = {"capacity_bytes": 4 << 20, "region_bytes": 512 * 1024}
ODD_SIZES = (1, 4095, 4096, 4097, 65536, (100, 3996), (4096, 1, 8191), (0, 7), 12288)
SAYS_ALL = "borrowed"
"""Its lookups answer that everything is held: the lender knows."""


@dataclass
class Place:
    """A tier that is read, and where its pages come from."""

    tier: TierEngine
    source: TierEngine
    settle: Callable[[], object] = lambda: None

    def store(self, run: Run) -> None:
        job = self.source.submit_store(run)
        assert job.wait(TIMEOUT_S)
        assert set(job.reasons) <= {Reason.OK, Reason.DUPLICATE}
        self.settle()

    def load(self, run: Run) -> list[Reason]:
        return finished(self.tier.submit_load(run))


def open_place(name: str, directory: Path, opened: ExitStack) -> Place:
    if name == "peers":
        servers = Servers(directory, opened, Tier.PEER)
        holder, own = servers.open("one"), servers.open("other")
        servers.connect()
        tiers: list[Any] = [stack.remote[Tier.PEER] for stack in (holder, own)]
        syncs = [tier._sync for tier in tiers]
        return Place(tiers[1], holder.nvme, lambda: know_each_other(*syncs))
    if name == SAYS_ALL:
        owner = open_region(directory / "store", **SIZES)
        opened.callback(owner.close)
        lender = PageLender(owner.directory, owner.submit_load)
        opened.callback(lender.close)
        borrower = BorrowedEngine()
        borrower.open(owner.directory)
        borrower.claim = b"model"
        lender.set_claim(b"model")
        return Place(borrower, owner)
    if name == "stack-of-nvme":
        tier: TierEngine = TierStack(open_region(directory / "store", **SIZES))
    elif name == "stack-from-remote":
        peers, bucket = SharedTier(tier=Tier.PEER), SharedTier()
        bucket.known = False  # nothing is copied down
        return Place(TierStack(open_region(directory / "store", **SIZES), [peers, bucket]), bucket)
    else:
        tier = open_tier(name, directory, **SIZES)
    return Place(tier, tier)


LOOKED_UP = [*KEEPING, "stack-of-nvme", "stack-from-remote", "peers"]


@pytest.fixture(params=LOOKED_UP)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as opened:
        made = open_place(request.param, tmp_path, opened)
        yield made
        close_whole(made.tier)


loads_from = pytest.mark.parametrize("place", [*LOOKED_UP, SAYS_ALL], indirect=True)


@loads_from
def test_what_was_stored_comes_back(place: Place, make_run: MakeRun) -> None:
    """In other segments, too, and into pages of one pool, which a disk fills as they are."""
    run, cut, aligned = (
        make_run(1, ODD_SIZES),
        make_run(2, [(5000, 5000)]),
        make_run(3, [8192] * 40),
    )
    place.store(run)
    assert place.tier.lookup(run.keys) == LookupResult(run.num_pages, Stop.END)
    assert place.tier.contains(run.keys) == [True] * run.num_pages
    loads(place.tier, run)
    place.store(cut)
    buffer = memoryview(bytearray(10_003))
    target = Run(cut.keys, ((buffer[3:9], buffer[9:7000], buffer[7000:]),))
    assert place.load(target) == [Reason.OK]
    assert bytes(buffer[3:]) == b"".join(cut.pages[0])
    assert bytes(buffer[:3]) == b"\0\0\0", "a byte beside the page was touched"
    place.store(aligned)
    pool = aligned_buffer(8192 * 40)
    pages = tuple((pool[start : start + 8192],) for start in range(0, len(pool), 8192))
    assert set(place.load(Run(aligned.keys, pages))) == {Reason.OK}
    assert bytes(pool) == b"".join(page_data(aligned))


def test_lookup_counts_leading_hits_only(place: Place, make_run: MakeRun) -> None:
    run = make_run(4, [4096] * 5)
    place.store(select(run, [0, 1, 3, 4]))
    assert place.tier.lookup(run.keys) == LookupResult(2, Stop.MISS)
    assert place.tier.lookup(run.keys[3:]) == LookupResult(2, Stop.END)
    assert place.tier.lookup(run.keys[2:]) == LookupResult(0, Stop.MISS)
    assert place.tier.lookup(()) == LookupResult(0, Stop.END)
    assert place.tier.contains(run.keys) == [True, True, False, True, True]


@loads_from
def test_missing_page_in_the_middle_leaves_its_neighbours(place: Place, make_run: MakeRun) -> None:
    run = make_run(5, [4096, 5000, 4096, 100])
    place.store(select(run, [0, 2, 3]))
    target = blank(run)
    assert place.load(target) == [Reason.OK, Reason.MISS, Reason.OK, Reason.OK]
    assert page_data(target)[1] == b"\xa5" * 5000
    assert page_data(target)[2:] == page_data(run)[2:]


@loads_from
def test_buffer_of_wrong_length_is_an_untouched_miss(place: Place, make_run: MakeRun) -> None:
    run = make_run(6, [4096])
    place.store(run)
    for nbytes in (4095, 4097, 8192):
        target = blank(Run(run.keys, ((memoryview(bytes(nbytes)),),)))
        assert place.load(target) == [Reason.MISS]
        assert page_data(target) == [b"\xa5" * nbytes]
        place.store(make_run(60 + nbytes, [10]))  # a change, so that a peer tells of it anew
    if not isinstance(place.tier, PeerTier):  # which asks nobody again for what was lacking
        loads(place.tier, run)


@loads_from
def test_loads_from_many_threads(place: Place, make_run: MakeRun) -> None:
    runs = [make_run(20 + number, [10_000] * 20) for number in range(8)]
    for run in runs:
        place.store(run)
    with ThreadPoolExecutor(8) as threads:
        for _ in threads.map(lambda run: loads(place.tier, *[run] * 5), runs):
            pass


@loads_from
def test_a_callback_sees_complete_reasons(place: Place, make_run: MakeRun) -> None:
    run = make_run(12, [4096] * 3)
    place.store(run)
    seen: list[list[Reason]] = []
    job = place.tier.submit_load(blank(run))
    job.call_at_end(lambda job: seen.append(list(job.reasons)))
    finished(job)
    assert seen == [[Reason.OK] * 3]


def test_what_was_purged_is_hidden_at_once(place: Place, make_run: MakeRun) -> None:
    run, tenant = make_run(13, [4096] * 3), b"t" * 16
    place.store(Run(run.keys, run.pages, tenant))
    assert place.tier.lookup(run.keys).num_hits == 3
    purge = place.tier.erase(Erasure(tenant=tenant))
    assert place.tier.contains(run.keys) == [False] * 3
    assert is_true(purge, TIMEOUT_S)
    assert place.tier.lookup(run.keys).num_hits == 0


def test_a_forgotten_page_is_hidden_until_stored_again(place: Place, make_run: MakeRun) -> None:
    run = make_run(16, [4096] * 4)
    place.store(run)
    assert place.tier.lookup(run.keys).num_hits == 4
    begun = place.tier.erase(Erasure.of(run.keys[1:3]))
    assert place.tier.contains(run.keys[1:3]) == [False, False]
    assert place.tier.lookup(run.keys).num_hits <= 1
    if not isinstance(place.tier, PeerTier):
        assert place.tier.contains(run.keys) == [True, False, False, True]
        assert place.load(blank(run)) == [Reason.OK, Reason.MISS, Reason.MISS, Reason.OK]
        assert is_true(begun, TIMEOUT_S)
    if place.tier is not place.source:
        assert is_true(place.source.erase(Erasure.of(run.keys[1:3])), TIMEOUT_S)
        place.settle()
    place.store(select(run, [1]))

    def is_found_again() -> bool:
        place.settle()  # other servers say that they have forgotten
        return place.tier.contains(run.keys) == [True, True, False, True]

    eventually(is_found_again)
    target = blank(run)
    assert place.load(target)[:3] == [Reason.OK, Reason.OK, Reason.MISS]
    assert page_data(target)[1] == page_data(run)[1]


def test_pages_of_another_namespace_are_not_found(place: Place, make_run: MakeRun) -> None:
    run = make_run(14, [4096] * 3)
    place.store(run)
    place.tier.set_namespace(b"\x22" * 32)
    assert place.tier.lookup(run.keys).num_hits == 0
    assert place.tier.contains(run.keys) == [False] * 3


@loads_from
def test_a_closed_tier_answers_and_promises_nothing(place: Place, make_run: MakeRun) -> None:
    run = make_run(15, [4096] * 2)
    place.store(run)
    begun = place.tier.erase(Erasure(tenant=b"u" * 16))
    place.tier.close()
    place.tier.close()
    assert begun.done(), "a caller waits for a purge forever"
    assert place.tier.health is Health.FAILED
    assert place.tier.lookup(run.keys) == LookupResult(0, Stop.UNHEALTHY)
    assert place.tier.contains(run.keys) == [False] * 2
    assert place.tier.some_keys(9) == []
    assert place.load(blank(run)) == [Reason.CANCELLED] * 2
    takes_none = isinstance(place.tier, BorrowedEngine | PeerTier)
    stored = Reason.DUPLICATE if takes_none else Reason.CANCELLED
    assert finished(place.tier.submit_store(run)) == [stored] * 2
    assert not place.tier.flush(TIMEOUT_S)
    for after in (place.tier.erase(Erasure()), place.tier.erase(Erasure.of(run.keys))):
        assert after.done() and not after.result()
