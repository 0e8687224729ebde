"""One decision for all parts of a node, over an engine in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from host_pools import hashes

from kit.clock import Clock
from kit.memory import MemoryEngine
from sglang_tiered.integration.identity.tenants import UNKNOWN_TENANT
from sglang_tiered.integration.storage.admission_gate import QueuedStore, StoreGate
from sglang_tiered.policy.admission import LONG_PREFIX_TOKENS, Level, Outcome
from sglang_tiered.storage.base import Run

BUSY_S = 2.5  # waits that make the tier selective, and close it
VERY_LONG = LONG_PREFIX_TOKENS * 4


class Tier:
    """A gate over an engine, and the operations that pass through it."""

    def __init__(self, **settings: int) -> None:
        self.clock = Clock()
        self.engine = MemoryEngine(1 << 20)
        self.gate = StoreGate(
            self.engine, **{"host_tokens": 1 << 30, "page_bytes": 100, **settings}, clock=self.clock
        )

    def queue(
        self, pages: Sequence[str], prefix_tokens: int = 64, *, waits_s: float = 0.0, **more: Any
    ) -> QueuedStore:
        """Queue a store, and let it wait before the storage thread comes to it."""
        store = self.gate.queue_store(
            pages, num_tokens=64 * len(pages), prefix_tokens=prefix_tokens, **more
        )
        self.clock.now += waits_s
        return store

    def store(
        self, pages: Sequence[str], of: QueuedStore | None = None, *, is_kv: bool = True
    ) -> int:
        """Store pages, of a node of their own without ``of``."""
        admitted = self.gate.num_admitted(of or self.queue(pages), pages)
        if is_kv and admitted:
            run_keys = tuple(bytes.fromhex(text) for text in pages[:admitted])
            self.engine.submit_store(
                Run(run_keys, tuple((memoryview(bytearray(100)),) for _ in run_keys))
            )
        return admitted


@pytest.fixture
def tier() -> Tier:
    return Tier()


def test_node_of_several_parts_is_decided_once(tier: Tier) -> None:
    pages = hashes(*map(str, range(300)))
    node = tier.queue(pages, VERY_LONG, waits_s=BUSY_S)
    assert tier.store(pages[:128], node) == 128
    tier.clock.now += 100  # nothing that happens later changes what was decided
    assert tier.store(pages[128:256], node) == 128
    assert tier.store(pages[256:], node) == 44
    assert (
        tier.gate.outcomes[Outcome.ADMITTED] == 300
        and tier.gate._admission.level is Level.SELECTIVE
    )


def test_window_is_dropped_with_its_kvs_tail(tier: Tier) -> None:
    tier.store(hashes(*"ab"))
    node = tier.queue(hashes(*"abcd"), waits_s=BUSY_S)
    assert tier.store(hashes(*"bcd"), node, is_kv=False) == 1
    assert tier.store(hashes(*"abcd"), node) == 2


def test_budget_is_charged_what_the_device_was_given() -> None:
    tier = Tier(writes_per_day=100_000)  # a burst of 10,000 bytes: 87 pages with their overhead
    assert tier.store(hashes(*map(str, range(40)))) == 40
    tier.store(hashes("next"))
    assert tier.gate.budget_bytes == 10_000 - 40 * 100
    tier.store(hashes("after"))  # each byte is charged once
    assert tier.gate.budget_bytes == 10_000 - 41 * 100


def test_no_end_of_a_store_leaves_it_waiting(tier: Tier) -> None:
    """What waits is host memory that makes the tier selective."""
    begun, refused, unbegun, empty, queued = (
        tier.queue(hashes(*name)) for name in ("ab", "cd", "ef", "", "gh")
    )
    tier.store(hashes(*"ab"), begun)
    tier.gate.refuse(refused)
    for each in (begun, refused, unbegun, empty):
        tier.gate.store_ended(each)
    assert list(tier.gate._stores) == [queued] and tier.gate._waiting_tokens == 128
    tier.gate.tree_was_reset()
    tier.gate.store_ended(queued)
    assert not tier.gate._stores and not tier.gate._waiting and not tier.gate._waiting_tokens


@pytest.mark.parametrize("tenant", [b"a" * 16, None])
def test_hidden_tenants_queued_stores_are_dropped(tier: Tier, tenant: bytes | None) -> None:
    """Both of a node that a checkpoint queued again, and what has not begun of one under way."""
    pages = hashes(*map(str, range(300)))
    running = tier.queue(pages, 300, tenant=b"a" * 16)
    assert tier.store(pages[:128], running) == 128
    tier.gate.drop_queued(b"b" * 16)
    assert tier.store(pages[128:256], running) == 128
    owners = [("abc", b"a" * 16), ("abc", b"a" * 16), ("xyz", b"b" * 16), ("uvw", UNKNOWN_TENANT)]
    nodes = [(hashes(*names), tier.queue(hashes(*names), tenant=whose)) for names, whose in owners]
    tier.gate.drop_queued(tenant)
    admitted = [tier.store(*node) for node in nodes]
    others = 0 if tenant is None else 3
    assert admitted == [0, 0, others, 0], "what is of nobody known may be its own"
    assert tier.store(pages[256:], running) == 0
    again = tier.queue(hashes(*"abc"), tenant=b"a" * 16)
    assert tier.store(hashes(*"abc"), again) == 3, "what comes after the purge is stored"
