"""Purges that other servers tell us of: the tiers forget at once, nothing of the tenant is stored
until the scheduler has put its memory out of reach, and all ranks do that in the same step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
import torch

from sglang_tiered.integration.identity.forgotten_pages import ForgottenPages
from sglang_tiered.integration.identity.tenants import UNKNOWN_TENANT
from sglang_tiered.integration.ranks.purge_exchange import INITIAL, RULES, PurgeExchange
from sglang_tiered.integration.ranks.rank_consensus import RankAgreement
from sglang_tiered.integration.storage.admission_gate import StoreGate
from sglang_tiered.integration.storage.remote_erasures import MAX_WAITING, MEMORY, RemoteErasures
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.memory import MemoryEngine
from sglang_tiered.storage.promises import ended

if TYPE_CHECKING:
    from concurrent.futures import Future

A, B = bytes(range(16)), bytes(range(240, 256))
PAGE = "ab" * 32


class Rank:
    def __init__(self, *, is_first: bool, is_alone: bool) -> None:
        self.gate = StoreGate(MemoryEngine(1 << 20), host_tokens=1 << 30, page_bytes=100)
        self.purged: list[bytes | None] = []
        self.forgotten: list[bytes] = []
        self.hidden = ForgottenPages()
        self.told = RemoteErasures(self.gate, self.erase)
        self.exchange: PurgeExchange | None = None
        self.agreement = RankAgreement(INITIAL, RULES, is_first=is_first, is_alone=is_alone)
        self.acted: list[bytes | None] = []

    def erase(self, what: Erasure) -> Future[bool]:
        if what.keys is None:
            self.purged.append(what.tenant)
        else:
            self.forgotten += what.keys
        return ended(True)

    def hear(self, tenant: bytes | None) -> None:
        self.told(Erasure(None, tenant, spread=False))

    def hear_pages(self, *keys: bytes) -> None:
        self.told(Erasure.of(keys, spread=False))

    def act(self) -> None:
        if self.exchange is None or self.exchange.purges is not self.told:
            self.exchange = PurgeExchange(self.told, self.agreement)
        for tenant in self.exchange.next():
            self.acted.append(tenant)
            self.exchange.applied(tenant)

    def stores(self, tenant: bytes) -> bool:
        """Whether a page of the tenant is let through."""
        self.gate.announce_store([PAGE], num_tokens=64, prefix_tokens=64, tenant=tenant)
        return self.gate.num_admitted([PAGE], is_kv=True) == 1


def make_ranks(number: int) -> list[Rank]:
    return [Rank(is_first=i == 0, is_alone=number == 1) for i in range(number)]


def step(ranks: list[Rank]) -> None:
    """What every rank does in a scheduler step."""
    if len(ranks) > 1:
        reduced = functools.reduce(
            torch.minimum, [rank.agreement.values_to_send() for rank in ranks]
        )
        for rank in ranks:
            rank.agreement.accept_values(reduced.clone())
    for rank in ranks:
        rank.act()


def test_a_lone_scheduler_acts_in_its_next_step() -> None:
    (rank,) = ranks = make_ranks(1)
    step(ranks)
    rank.hear(A)
    assert rank.purged == [A]
    step(ranks)
    step(ranks)
    assert rank.acted == [A]


def test_purged_memory_is_not_stored_until_unreachable() -> None:
    """Others take pages from us from the moment we were told: device and host memory still hold
    what they purged, and the tree would have it stored."""
    (rank,) = ranks = make_ranks(1)
    step(ranks)
    assert rank.stores(A)
    rank.hear(A)
    assert not rank.stores(A)
    assert not rank.stores(UNKNOWN_TENANT), "it may be anybody's"
    assert rank.stores(B)
    step(ranks)
    assert rank.stores(A)
    rank.hear(None)
    assert not rank.stores(B)
    step(ranks)
    assert rank.stores(B)
    assert rank.acted == [A, None]


def test_a_purge_stops_an_admitted_operation() -> None:
    (rank,) = ranks = make_ranks(1)
    step(ranks)
    pages = [f"{number:064x}" for number in range(4)]
    rank.gate.announce_store(pages, num_tokens=256, prefix_tokens=256, tenant=A)
    assert rank.gate.num_admitted(pages[:2], is_kv=True) == 2
    rank.hear(A)
    assert rank.gate.num_admitted(pages[2:], is_kv=True) == 0


def test_all_ranks_apply_the_first_ranks_purge_together() -> None:
    """Requests go by other keys from then on: a rank that did so alone would match other nodes."""
    ranks = make_ranks(3)
    step(ranks)
    ranks[1].hear(A)
    step(ranks)
    assert [rank.acted for rank in ranks] == [[], [], []]
    assert ranks[1].purged == [A], "its tiers need not wait"
    assert ranks[1].stores(A), "or it would for ever, should the first never hear of it"
    ranks[0].hear(A)
    ranks[0].hear(B)
    for _ in range(8):
        step(ranks)
        assert ranks[0].acted == ranks[1].acted == ranks[2].acted
    assert ranks[0].acted == [A, B]
    assert ranks[0].stores(A)


def test_purges_other_ranks_heard_first_block_nothing() -> None:
    ranks = make_ranks(2)
    ranks[1].hear(A)
    step(ranks)
    assert ranks[1].stores(A)


def test_reattached_storage_does_not_repeat_purges() -> None:
    (rank,) = ranks = make_ranks(1)
    rank.hear(A)
    step(ranks)
    rank.told = RemoteErasures(rank.gate, rank.erase)
    step(ranks)
    assert rank.acted == [A]
    rank.hear(B)
    step(ranks)
    assert rank.acted == [A, B]


@pytest.mark.parametrize("number", [MAX_WAITING, MAX_WAITING + 1])
def test_more_than_can_wait_hides_all_memory(number: int) -> None:
    (rank,) = ranks = make_ranks(1)
    step(ranks)
    for index in range(number):
        rank.hear(index.to_bytes(16, "big"))
    expected = number if number <= MAX_WAITING else 1
    for _ in range(expected + 2):
        step(ranks)
    assert len(rank.acted) == expected
    assert (MEMORY in rank.acted) == (number > MAX_WAITING)
    assert len(rank.purged) == number and None not in rank.purged, "the tiers keep others' pages"
    assert not rank.gate.blocked


def test_lone_scheduler_hides_forgotten_pages_at_once() -> None:
    (rank,) = ranks = make_ranks(1)
    key = bytes.fromhex(PAGE)
    rank.hear_pages(key)  # the tiers are open, and memory is not asked yet
    rank.told.use_forgotten(rank.hidden, is_alone=True)
    assert PAGE in rank.hidden
    rank.hear_pages(bytes(32))
    assert bytes(32).hex() in rank.hidden and rank.forgotten == [key, bytes(32)]
    step(ranks)
    assert rank.acted == []


def test_ranks_hide_memory_together_for_forgotten_pages() -> None:
    """Hashes have no place in what ranks exchange, and a rank alone must not match less."""
    ranks = make_ranks(2)
    for rank in ranks:
        rank.told.use_forgotten(rank.hidden, is_alone=False)
    step(ranks)
    ranks[0].hear_pages(bytes(32))
    ranks[0].hear_pages(bytes(32))
    ranks[1].hear_pages(bytes(32))
    assert not ranks[0].stores(A), "memory may hold the page still"
    for _ in range(4):
        step(ranks)
    assert [rank.acted for rank in ranks] == [[MEMORY], [MEMORY]]
    assert ranks[0].stores(A) and not ranks[0].hidden


def test_pipeline_stage_leaves_memory_alone() -> None:
    """Its stages would hide at different times, and what waits for a scheduler blocks stores."""
    (rank,) = make_ranks(1)
    rank.hear_pages(bytes.fromhex(PAGE))
    rank.told.clear_tiers_only()
    rank.told.use_forgotten(rank.hidden, is_alone=False)
    rank.hear_pages(bytes(32))
    rank.hear(A)
    assert rank.forgotten == [bytes.fromhex(PAGE), bytes(32)] and rank.purged
    assert not rank.hidden and not rank.told.waiting() and rank.stores(A)
