"""One decision for all parts of a node, over an engine in memory."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from kit.clock import Clock
from kit.memory import MemoryEngine
from sglang_tiered.integration.identity.tenants import UNKNOWN_TENANT
from sglang_tiered.integration.storage.admission_gate import LOG_INTERVAL_S, QueuedStore, StoreGate
from sglang_tiered.policy.admission import LONG_PREFIX_TOKENS, Level, Outcome
from sglang_tiered.storage.base import Run

BUSY_S = 2.5  # waits that make the tier selective, and close it
EXHAUSTED_S = 5.0
VERY_LONG = LONG_PREFIX_TOKENS * 4


def hashes(*names: object) -> list[str]:
    return [hashlib.sha256(str(name).encode()).hexdigest() for name in names]


class Tier:
    """A gate over an engine, and the operations that pass through it."""

    def __init__(self, **settings: int) -> None:
        self.clock = Clock()
        self.engine = MemoryEngine(1 << 20)
        self.gate = StoreGate(
            self.engine, **{"host_tokens": 1 << 30, "page_bytes": 100, **settings}, clock=self.clock
        )

    @property
    def level(self) -> Level:
        return self.gate._admission.level

    def queue(
        self, pages: Sequence[str], prefix_tokens: int = 64, *, waits_s: float = 0.0, **more: Any
    ) -> QueuedStore:
        """Queue a store, and let it wait before the storage thread comes to it."""
        store = self.gate.queue_store(
            pages, num_tokens=64 * len(pages), prefix_tokens=prefix_tokens, **more
        )
        self.clock.now += waits_s
        return store

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

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

    def make_busy(self, waited_s: float = BUSY_S) -> None:
        """An operation of its own arrives after a long wait."""
        self.store(hashes("busy"), self.queue(hashes("busy"), waits_s=waited_s))


@pytest.fixture
def tier() -> Tier:
    return Tier()


def test_node_of_several_parts_is_decided_once(tier: Tier) -> None:
    pages = hashes(*range(300))
    node = tier.queue(pages, VERY_LONG, waits_s=BUSY_S)
    assert tier.store(pages[:128], node) == 128
    tier.wait(100)  # nothing that happens later changes what was decided
    assert tier.store(pages[128:256], node) == 128
    assert tier.store(pages[256:], node) == 44
    assert tier.gate.outcomes[Outcome.ADMITTED] == 300 and tier.level is Level.SELECTIVE


@pytest.mark.parametrize(("prefix_tokens", "admitted"), [(64, 0), (VERY_LONG, 3)])
def test_other_pools_follow_the_kv_of_their_node(
    tier: Tier, prefix_tokens: int, admitted: int
) -> None:
    """They come first, and neither may be stored without the other."""
    pages = hashes(*"abc")
    node = tier.queue(pages, prefix_tokens, waits_s=BUSY_S)
    assert tier.store(pages, node, is_kv=False) == admitted
    assert tier.store(pages[-1:], node, is_kv=False) == min(admitted, 1)
    assert tier.store(pages, node) == admitted


def test_window_is_dropped_with_its_kvs_tail(tier: Tier) -> None:
    tier.store(hashes(*"ab"))
    node = tier.queue(hashes(*"abcd"), waits_s=BUSY_S)
    assert tier.store(hashes(*"bcd"), node, is_kv=False) == 1
    assert tier.store(hashes(*"abcd"), node) == 2


def test_stored_page_passes_a_closed_tier(tier: Tier) -> None:
    tier.store(hashes(*"ab"))
    tier.make_busy(EXHAUSTED_S)
    assert tier.level is Level.CLOSED
    node = tier.queue(hashes(*"abc"), waits_s=EXHAUSTED_S)
    assert tier.store(hashes(*"abc"), node) == 2
    assert tier.gate.outcomes[Outcome.DROPPED_BACKLOG] == 1 + 1  # and the one that made it busy


def test_wait_of_the_last_operation_is_known(tier: Tier) -> None:
    tier.store(hashes("a"), tier.queue(hashes("a"), waits_s=1.5))
    assert tier.gate.waited_s == 1.5


def test_long_pinned_host_memory_closes_the_tier_first() -> None:
    tier = Tier(host_tokens=64 * 20)
    first = tier.queue(hashes(0))
    for number in range(1, 20):
        tier.queue(hashes(number))
    tier.wait(1.5)
    assert tier.store(hashes(0), first) == 0
    assert tier.level is Level.SELECTIVE


def test_budget_is_charged_what_the_device_was_given() -> None:
    tier = Tier(writes_per_day=100_000)  # a burst of 10,000 bytes: 87 pages with their overhead
    assert tier.store(hashes(*range(40))) == 40
    tier.store(hashes("next"))
    assert tier.gate.budget_bytes == 10_000 - 40 * 100
    tier.store(hashes("after"))  # each byte is charged once
    assert tier.gate.budget_bytes == 10_000 - 41 * 100


# ---- Ancestors of a chain that became long ----


def test_selective_tier_wants_ancestors_of_grown_chains(tier: Tier) -> None:
    assert not tier.gate.wants_ancestors(1 << 30)
    assert tier.store(hashes("dropped"), tier.queue(hashes("dropped"), waits_s=BUSY_S)) == 0
    tier.engine.submit_store(
        Run((bytes.fromhex(hashes("held")[0]),), ((memoryview(bytearray(9)),),))
    )
    assert not tier.gate.wants_ancestors(LONG_PREFIX_TOKENS - 1)
    assert tier.gate.wants_ancestors(VERY_LONG)
    assert tier.gate.offer_again(hashes("dropped"), prefix_tokens=9999)
    assert not tier.gate.offer_again(hashes("held"), prefix_tokens=9999)
    assert not tier.gate.offer_again([], prefix_tokens=9999)


def test_waiting_ancestor_is_admitted_as_long_once(tier: Tier) -> None:
    tier.make_busy()
    node = tier.queue(hashes(*"ab"), prefix_tokens=128)
    assert not tier.gate.offer_again(hashes(*"ab"), prefix_tokens=VERY_LONG)
    tier.wait(BUSY_S)
    assert tier.store(hashes(*"ab"), node) == 2
    assert not tier.gate._waiting


def test_sick_engine_is_offered_nothing_again(tier: Tier) -> None:
    tier.engine.close()
    assert not tier.gate.offer_again(hashes("a"), prefix_tokens=9999)


def test_budget_counts_a_store_that_just_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks it is not yet written at the first, and not queued at the second."""
    tier = Tier(writes_per_day=100_000)  # of which a tenth at once
    stats = tier.engine.stats()
    looks = [
        dataclasses.replace(stats, queued_store_bytes=10_000),
        dataclasses.replace(stats, bytes_written=stats.bytes_written + 10_000),
    ]
    monkeypatch.setattr(tier.engine, "stats", lambda: looks.pop(0))
    assert tier.store(hashes(*range(50))) == 0


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


def test_changed_level_is_logged_once_a_minute(
    tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            tier.make_busy()
            tier.make_busy(0.0)
        assert [record.getMessage() for record in caplog.records] == [
            "NVMe tier admission is selective now"
        ]
        tier.wait(LOG_INTERVAL_S)
        tier.make_busy(0.0)
    assert caplog.records[-1].getMessage() == "NVMe tier admission is open now"


@pytest.mark.parametrize("tenant", [b"a" * 16, None])
def test_hidden_tenants_queued_stores_are_dropped(tier: Tier, tenant: bytes | None) -> None:
    names = {"abc": b"a" * 16, "xyz": b"b" * 16, "uvw": UNKNOWN_TENANT}
    nodes = {name: tier.queue(hashes(*name), tenant=whose) for name, whose in names.items()}
    tier.gate.drop_queued(tenant)
    admitted = [tier.store(hashes(*name), node) for name, node in nodes.items()]
    assert admitted == [0, 0 if tenant is None else 3, 0], "what is of nobody known may be its own"
    again = tier.queue(hashes(*"abc"), tenant=b"a" * 16)
    assert tier.store(hashes(*"abc"), again) == 3, "what comes after the purge is stored"


def test_a_purge_ends_its_tenants_running_store(tier: Tier) -> None:
    pages = hashes(*range(300))
    node = tier.queue(pages, 300, tenant=b"a" * 16)
    assert tier.store(pages[:128], node) == 128
    tier.gate.drop_queued(b"b" * 16)
    assert tier.store(pages[128:256], node) == 128
    tier.gate.drop_queued(b"a" * 16)
    assert tier.store(pages[256:], node) == 0


def test_node_queued_twice_is_purged_twice(tier: Tier) -> None:
    """A checkpoint queues again what is queued."""
    pages = hashes(*"abc")
    nodes = [tier.queue(pages, tenant=b"a" * 16) for _ in range(2)]
    tier.gate.drop_queued(b"a" * 16)
    assert [tier.store(pages, node) for node in nodes] == [0, 0]


def test_split_node_leaves_its_tail_admitted(tier: Tier) -> None:
    """Its first part is queued under the same page while the whole is queued."""
    pages = hashes(*"abcdef")
    whole, part = tier.queue(pages), tier.queue(pages[:2])
    assert tier.store(pages, whole) == 6
    assert tier.store(pages[:2], part) == 2 and tier.gate.outcomes[Outcome.ADMITTED] == 8
