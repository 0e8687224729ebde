"""One decision for all the calls SGLang makes of an operation, over an engine in memory."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from typing import TYPE_CHECKING

import pytest

from kit.clock import Clock
from sglang_tiered.integration.identity.tenants import UNKNOWN_TENANT
from sglang_tiered.integration.storage.admission_gate import LOG_INTERVAL_S, StoreGate
from sglang_tiered.policy.admission import (
    LONG_PREFIX_TOKENS,
    MAX_PENDING_STORES,
    Level,
    Outcome,
)
from sglang_tiered.storage.base import Run
from sglang_tiered.storage.memory import MemoryEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

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
            self.engine,
            **{"host_tokens": 1 << 30, "page_bytes": 100, **settings},
            clock=self.clock,
        )

    @property
    def level(self) -> Level:
        return self.gate._admission.level

    def announce(
        self, pages: Sequence[str], prefix_tokens: int = 64, *, waits_s: float = 0.0
    ) -> None:
        """Queue an operation, and let it wait before the storage thread comes to it."""
        self.gate.announce_store(pages, num_tokens=64 * len(pages), prefix_tokens=prefix_tokens)
        self.clock.now += waits_s

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    def store(self, pages: Sequence[str], *, is_kv: bool = True) -> int:
        admitted = self.gate.num_admitted(pages, is_kv=is_kv)
        if is_kv and admitted:
            run_keys = tuple(bytes.fromhex(text) for text in pages[:admitted])
            self.engine.submit_store(
                Run(run_keys, tuple((memoryview(bytearray(100)),) for _ in run_keys))
            )
        return admitted

    def make_busy(self, waited_s: float = BUSY_S) -> None:
        """An operation of its own arrives after a long wait."""
        self.announce(hashes("busy"), waits_s=waited_s)
        self.store(hashes("busy"))


def test_idle_tier_takes_every_operation_whole() -> None:
    tier = Tier()
    for name in "abc":
        pages = hashes(*(f"{name}{page}" for page in range(300)))
        tier.announce(pages)
        assert [tier.store(pages[at : at + 128]) for at in (0, 128, 256)] == [128, 128, 44]
    assert tier.gate.outcomes[Outcome.ADMITTED] == 900


def test_operation_of_several_calls_is_decided_once() -> None:
    tier = Tier()
    pages = hashes(*range(300))
    tier.announce(pages, VERY_LONG, waits_s=BUSY_S)
    assert tier.store(pages[:128]) == 128
    tier.wait(100)  # nothing that happens later changes what was decided
    assert tier.store(pages[128:256]) == 128
    assert tier.store(pages[256:]) == 44
    assert tier.gate.outcomes[Outcome.ADMITTED] == 300 and tier.level is Level.SELECTIVE


@pytest.mark.parametrize(("prefix_tokens", "admitted"), [(64, 0), (VERY_LONG, 3)])
def test_other_pools_follow_the_kv_of_their_operation(prefix_tokens: int, admitted: int) -> None:
    """They come first, and neither may be stored without the other."""
    tier = Tier()
    pages = hashes(*"abc")
    tier.announce(pages, prefix_tokens, waits_s=BUSY_S)
    assert tier.store(pages, is_kv=False) == admitted
    assert tier.store(pages[-1:], is_kv=False) == min(admitted, 1)
    assert tier.store(pages) == admitted


def test_window_is_dropped_with_its_kvs_tail() -> None:
    tier = Tier()
    tier.announce(hashes(*"ab"))
    tier.store(hashes(*"ab"))
    tier.announce(hashes(*"abcd"), waits_s=BUSY_S)
    assert tier.store(hashes(*"bcd"), is_kv=False) == 1
    assert tier.store(hashes(*"abcd")) == 2


def test_second_offer_of_a_dropped_operation_is_admitted() -> None:
    tier = Tier()
    for expected in (0, 2):
        tier.announce(hashes(*"ab"), waits_s=BUSY_S)
        assert tier.store(hashes(*"ab")) == expected


def test_node_behind_a_broken_operation_is_decided_anew() -> None:
    """SGLang leaves out the rest of an operation once a page of it was not stored."""
    tier = Tier()
    tier.store(hashes("a"))
    pages = hashes(*"abcd")
    tier.announce(pages, waits_s=BUSY_S)
    assert tier.store(pages[:2]) == 1
    tier.announce(pages[2:], VERY_LONG, waits_s=BUSY_S)
    assert tier.store(pages[2:]) == 2


def test_unannounced_operation_counts_as_short_each_time() -> None:
    tier = Tier()
    tier.make_busy()
    assert tier.store(hashes(*"ab"), is_kv=False) == 0
    assert tier.store(hashes(*"ab")) == 0
    assert tier.store(hashes(*"ab")) == 2
    assert tier.gate.num_admitted([], is_kv=True) == 0


def test_unannounced_pools_are_stored_while_everything_is() -> None:
    assert Tier().store(hashes(*"ab"), is_kv=False) == 2


def test_stored_page_passes_a_closed_tier() -> None:
    tier = Tier()
    tier.store(hashes(*"ab"))
    tier.make_busy(EXHAUSTED_S)
    assert tier.level is Level.CLOSED
    assert tier.store(hashes(*"abc")) == 2
    assert tier.gate.outcomes[Outcome.DROPPED_BACKLOG] == 1 + 1  # and the one that made it busy


def test_wait_of_the_last_operation_is_known() -> None:
    tier = Tier()
    tier.announce(hashes("a"), waits_s=1.5)
    tier.store(hashes("a"))
    assert tier.gate.waited_s == 1.5


def test_drained_queue_opens_the_tier_again() -> None:
    tier = Tier()
    tier.make_busy(EXHAUSTED_S)
    tier.announce(hashes("a"))
    assert tier.store(hashes("a")) == 1


def test_long_pinned_host_memory_closes_the_tier_first() -> None:
    tier = Tier(host_tokens=64 * 20)
    for number in range(20):
        tier.announce(hashes(number))
    tier.wait(1.5)
    assert tier.store(hashes(0)) == 0
    assert tier.level is Level.SELECTIVE


def test_budget_is_charged_what_the_device_was_given() -> None:
    tier = Tier(writes_per_day=100_000)  # a burst of 10,000 bytes: 87 pages with their overhead
    assert tier.store(hashes(*range(40))) == 40
    tier.store(hashes("next"))
    assert tier.gate.budget_bytes == 10_000 - 40 * 100
    tier.store(hashes("after"))  # each byte is charged once
    assert tier.gate.budget_bytes == 10_000 - 41 * 100


def test_used_up_budget_drops_and_says_so() -> None:
    tier = Tier(writes_per_day=100_000)
    assert tier.store(hashes(*range(200))) == 86
    assert tier.gate.outcomes[Outcome.DROPPED_BUDGET] == 114
    assert tier.store(hashes("late")) == 0


# ---- Ancestors of a chain that became long ----


def test_idle_tier_wants_no_ancestors() -> None:
    assert not Tier().gate.wants_ancestors(1 << 30)


def test_selective_tier_wants_ancestors_of_grown_chains() -> None:
    tier = Tier()
    tier.make_busy()
    tier.store(hashes("dropped"))
    tier.engine.submit_store(
        Run((bytes.fromhex(hashes("held")[0]),), ((memoryview(bytearray(9)),),))
    )
    assert not tier.gate.wants_ancestors(LONG_PREFIX_TOKENS - 1)
    assert tier.gate.wants_ancestors(VERY_LONG)
    assert tier.gate.offer_again(hashes("dropped"), prefix_tokens=9999)
    assert not tier.gate.offer_again(hashes("held"), prefix_tokens=9999)
    assert not tier.gate.offer_again([], prefix_tokens=9999)


def test_waiting_ancestor_is_admitted_as_long_once() -> None:
    tier = Tier()
    tier.make_busy()
    tier.announce(hashes(*"ab"), prefix_tokens=128)
    assert not tier.gate.offer_again(hashes(*"ab"), prefix_tokens=VERY_LONG)
    tier.wait(BUSY_S)
    assert tier.store(hashes(*"ab")) == 2


def test_sick_engine_is_offered_nothing_again() -> None:
    tier = Tier()
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


def test_reset_tree_leaves_no_announcement() -> None:
    tier = Tier()
    tier.announce(hashes(*"ab"), VERY_LONG)
    tier.gate.tree_was_reset()
    assert len(tier.gate._pending) == 0


def test_changed_level_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = Tier()
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


def test_an_unannounced_operation_has_no_tenant() -> None:
    tier = Tier()
    pages = hashes(*"abc")
    tier.gate.announce_store(pages, num_tokens=192, prefix_tokens=64, tenant=b"a" * 16)
    assert tier.store(pages) == 3 and tier.gate.tenant == b"a" * 16
    assert tier.store(hashes(*"xy")) == 2 and tier.gate.tenant == UNKNOWN_TENANT


@pytest.mark.parametrize("tenant", [b"a" * 16, None])
def test_hidden_tenants_queued_stores_are_dropped(tenant: bytes | None) -> None:
    tier = Tier()
    mine, other = hashes(*"abc"), hashes(*"xyz")
    tier.gate.announce_store(mine, num_tokens=192, prefix_tokens=64, tenant=b"a" * 16)
    tier.gate.announce_store(other, num_tokens=192, prefix_tokens=64, tenant=b"b" * 16)
    tier.gate.drop_queued(tenant)
    assert tier.store(mine, is_kv=False) == tier.store(mine) == 0
    assert tier.store(other) == (0 if tenant is None else 3)
    tier.gate.announce_store(mine, num_tokens=192, prefix_tokens=64, tenant=b"a" * 16)
    assert tier.store(mine) == 3, "what comes after the purge is stored"


def test_a_purge_ends_its_tenants_running_operation() -> None:
    tier = Tier()
    pages = hashes(*range(300))
    tier.gate.announce_store(pages, num_tokens=300, prefix_tokens=300, tenant=b"a" * 16)
    assert tier.store(pages[:128]) == 128
    tier.gate.drop_queued(b"b" * 16)
    assert tier.store(pages[128:256]) == 128
    tier.gate.drop_queued(b"a" * 16)
    assert tier.store(pages[256:]) == 0


def test_second_announcement_forgets_nobody_between() -> None:
    """A checkpoint announces again what is queued: whatever is queued behind it is still known."""
    tier = Tier()
    mine, other = hashes(*"abc"), hashes(*"xyz")
    for pages, tenant in ((mine, b"a" * 16), (other, b"b" * 16), (mine, b"a" * 16)):
        tier.gate.announce_store(pages, num_tokens=192, prefix_tokens=64, tenant=tenant)
    assert tier.store(mine) == 3
    tier.gate.drop_queued(b"b" * 16)
    assert tier.store(other) == 0
    assert tier.store(mine) == 0, "nobody knows any more whose its second store is"
    tier.gate.tree_was_reset()
    assert tier.store(hashes(*"uvw")) == 3


def test_split_node_leaves_its_tail_admitted() -> None:
    """Its first part is announced under the same page while the whole is queued."""
    tier = Tier()
    pages, other = hashes(*"abcdef"), hashes(*"xyz")
    tier.announce(pages)
    tier.announce(other, 640)
    tier.announce(pages[:2])
    assert tier.store(pages) == 6
    assert tier.store(other) == 3 and tier.gate.outcomes[Outcome.ADMITTED] == 9


@pytest.mark.parametrize("is_kv", [True, False])
def test_purge_refuses_stores_that_were_forgotten(is_kv: bool) -> None:
    """Of more than are remembered, the oldest are of nobody known: perhaps of the purged tenant."""
    tier = Tier()
    for number in range(MAX_PENDING_STORES + 1):
        pages = hashes(number)
        tier.gate.announce_store(pages, num_tokens=1, prefix_tokens=1, tenant=b"a" * 16)
    tier.gate.drop_queued(b"a" * 16)
    assert tier.store(hashes(0), is_kv=is_kv) == 0
