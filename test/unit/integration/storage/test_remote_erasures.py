"""What others erased is not stored before memory hides it, on all ranks in the same step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from kit.memory import MemoryEngine
from sglang_tiered.integration.identity.tenants import UNKNOWN_TENANT
from sglang_tiered.integration.ranks import RankAgreement
from sglang_tiered.integration.storage.admission_gate import StoreGate
from sglang_tiered.integration.storage.remote_erasures import (
    MAX_BLOCKED_S,
    MAX_PACKED_PAGES,
    MAX_WAITING,
    MAX_WAITING_PAGES,
    RemoteErasures,
)
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.promises import ended

A, B = bytes(range(16)), bytes(range(240, 256))
KEY, OTHER = bytes.fromhex("ab" * 32), bytes(32)


class Rank:
    def __init__(self, *, is_first: bool, is_alone: bool) -> None:
        self.gate = StoreGate(MemoryEngine(1 << 20), host_tokens=1 << 30, page_bytes=100)
        self.erased: list[Erasure] = []  # in the tiers
        self.hidden: list[object] = []  # in memory
        self.now = 0.0
        self.heard = RemoteErasures(self.gate, self._erase, lambda: self.now)
        self.agreement = RankAgreement(is_first=is_first, is_alone=is_alone)

    def _erase(self, what: Erasure) -> Future[bool]:
        self.erased.append(what)
        with self.gate.lock:
            if what.keys is None:
                self.gate.drop_queued(what.tenant)
        return ended(True)

    def hear(self, tenant: bytes | None) -> None:
        self.heard(Erasure(tenant=tenant, spread=False))

    def hear_pages(self, *keys: bytes) -> None:
        self.heard(Erasure.of(keys, spread=False))

    def hide(self, erasures: Sequence[Erasure]) -> None:
        for each in erasures:
            self.hidden += [each.tenant] if each.keys is None else each.keys

    def stores(self, tenant: bytes, key: bytes = KEY) -> bool:
        """Whether a page of the tenant is let through."""
        queued = self.gate.queue_store([key.hex()], num_tokens=64, tenant=tenant)
        return self.gate.num_admitted(queued, queued.hashes) == 1


def make_ranks(number: int) -> list[Rank]:
    return [Rank(is_first=i == 0, is_alone=number == 1) for i in range(number)]


def step(ranks: list[Rank]) -> None:
    """What every rank does in a scheduler step."""
    for rank in ranks:
        rank.heard.ask(rank.agreement)
    if len(ranks) > 1:
        sent = [rank.agreement.values_to_send() for rank in ranks]
        reduced = functools.reduce(torch.minimum, sent)
        for rank in ranks:
            rank.agreement.accept_values(reduced.clone())
    said: list[bytes] = []

    def first_ranks(data: bytes) -> bytes:
        said.append(data)
        return said[0]

    for rank in ranks:
        rank.heard.step(rank.agreement, first_ranks, rank.hide)
    assert len(said) in (0, len(ranks)), "a rank waits for the others for ever"


def test_memory_is_not_stored_until_it_hides() -> None:
    """Others take pages from us already, and memory still holds what they erased."""
    (rank,) = ranks = make_ranks(1)
    step(ranks)
    assert rank.stores(A)
    rank.hear(A)
    rank.hear_pages(OTHER)
    assert len(rank.erased) == 2 and not rank.hidden
    assert not rank.stores(A)
    assert not rank.stores(UNKNOWN_TENANT), "it may be anybody's"
    assert rank.stores(B) and not rank.stores(B, OTHER)
    step(ranks)
    step(ranks)
    assert rank.hidden == [A, OTHER]
    assert rank.stores(A) and rank.stores(B, OTHER)
    rank.hear(None)
    assert not rank.stores(B)
    step(ranks)
    assert rank.stores(B)


def test_what_was_queued_meanwhile_is_not_stored() -> None:
    (rank,) = ranks = make_ranks(1)
    rank.hear(A)
    # The tree does not hide it yet.
    queued = rank.gate.queue_store([KEY.hex()], num_tokens=64, tenant=A)
    step(ranks)
    assert rank.gate.num_admitted(queued, queued.hashes) == 0


def test_all_ranks_hide_the_same_together() -> None:
    """Requests go by other keys from then on: a rank that did so alone would match other nodes."""
    ranks = make_ranks(3)
    purge = Erasure(tenant=A, spread=False)
    ranks[2].heard(purge)
    for _ in range(3):
        step(ranks)
    assert not any(rank.hidden for rank in ranks)
    assert len(ranks[2].erased) == 1, "its tiers need not wait"
    ranks[0].heard(purge)
    ranks[0].hear(None)
    ranks[0].hear_pages(KEY, OTHER)
    for _ in range(4):
        step(ranks)
        assert ranks[0].hidden == ranks[1].hidden == ranks[2].hidden
    assert ranks[0].hidden == [A, None, KEY, OTHER]
    assert ranks[0].stores(A)


@pytest.mark.parametrize("what", [Erasure(tenant=A, spread=False), Erasure.of([KEY], spread=False)])
def test_no_rank_stores_between_hearing_and_hiding(what: Erasure) -> None:
    """Its memory holds the pages until the first rank tells; but not for ever."""
    ranks = make_ranks(3)
    step(ranks)
    assert ranks[1].stores(A)
    ranks[1].heard(what)
    step(ranks)
    step(ranks)
    assert not ranks[1].stores(A) and ranks[2].stores(A)
    ranks[0].heard(what)
    for _ in range(3):
        step(ranks)
    assert all(rank.stores(A) for rank in ranks)
    ranks[2].heard(what)
    assert ranks[2].stores(A) and ranks[2].erased == [what]
    ranks[2].heard(replace(what, id=bytes(16)))
    assert not ranks[2].stores(A)
    ranks[2].now += MAX_BLOCKED_S
    step(ranks)
    assert ranks[2].stores(A)


@pytest.mark.parametrize("beyond", [0, 1])
def test_beyond_the_bound_memory_alone_hides_all(beyond: int) -> None:
    """The tiers have erased each already, and the bucket is not this server's alone."""
    (rank,) = ranks = make_ranks(1)
    for number in range(MAX_WAITING + beyond):
        rank.hear(number.to_bytes(16, "big"))
    step(ranks)
    assert len(rank.hidden) == (1 if beyond else MAX_WAITING)
    assert (None in rank.hidden) == bool(beyond)
    assert not any(each.is_everything for each in rank.erased)
    rank.hear_pages(*(number.to_bytes(32, "big") for number in range(MAX_WAITING_PAGES + beyond)))
    rank.hidden.clear()
    step(ranks)
    assert rank.hidden == [None] if beyond else len(rank.hidden) == MAX_PACKED_PAGES
    assert not any(each.is_everything for each in rank.erased)
