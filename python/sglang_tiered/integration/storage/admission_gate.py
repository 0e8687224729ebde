"""``StoreGate``: asks admission once per operation, however many calls SGLang makes of it.

One operation stores the pages of one radix node. It reaches the storage class as calls for the
other pools first (of the whole node, or of its last pages), then as calls for up to 128 KV pages
each. A page of another pool is useless without its KV, and a KV page is useless behind a missing
one, so the first call decides for all: a number of leading pages.

With several ranks each decides by its own disk. Where they differ, a page that some lack is a miss
for all, as SGLang takes the minimum over the ranks.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from sglang_tiered.daily_budget import DailyBudget
from sglang_tiered.integration.identity.tenants import UNKNOWN_TENANT
from sglang_tiered.policy.admission import (
    Admission,
    Level,
    PendingStores,
    backlog_pressure,
)
from sglang_tiered.storage.base import Stop

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from sglang_tiered.policy.admission import Outcome
    from sglang_tiered.storage.base import TierEngine

__all__ = ["StoreGate"]

LOG_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


class StoreGate:
    """Admits stores to NVMe. ``num_admitted`` and ``dropped_as`` run on the backup thread, the rest
    on the scheduler thread. Nothing here waits for I/O.

    ``waited_s`` is how long the operation that began last had waited; any thread may read it.
    ``lock`` is held by the backup thread from asking until what it stores is submitted, so that a
    an erasure comes before or after both. Queued stores belong to ``PendingStores``."""

    def __init__(
        self,
        engine: TierEngine,
        *,
        host_tokens: int,
        page_bytes: int,
        writes_per_day: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._host_tokens = host_tokens
        self._page_bytes = page_bytes
        self._clock = clock
        self._pending = PendingStores(clock)
        budget = None if writes_per_day is None else DailyBudget(writes_per_day, clock)
        self._admission = Admission(budget=budget)
        self._charging = threading.Lock()
        self._bytes_written = engine.stats().bytes_written
        self.waited_s = 0.0
        self._positions: dict[str, int] = {}  # of the pages of the operation under way
        self._num_admitted = 0
        self._next_kv = -1  # position of the next KV call of that operation
        self._has_dropped = False  # a tenant, while what was queued before may still arrive
        self.lock = threading.RLock()
        # Tenants whose pages are not stored now; None: all. The setter must erase them afterwards.
        self.blocked: frozenset[bytes | None] = frozenset()
        # Hashes of pages that memory hides, and of those that it will hide: none is stored. The
        # setter must erase them in the tiers after each change.
        self.hidden: Container[str] = frozenset()
        self.heard: Container[str] = frozenset()
        self.tenant = UNKNOWN_TENANT  # of the operation under way
        self._logged_level, self._next_log = Level.OPEN, clock()

    @property
    def outcomes(self) -> dict[Outcome, int]:
        return self._admission.outcomes

    @property
    def budget_bytes(self) -> float | None:
        """Return what the write budget leaves for now; None without a budget."""
        return self._admission.budget_bytes

    def announce_store(
        self,
        hashes: Sequence[str],
        *,
        num_tokens: int,
        prefix_tokens: int,
        tenant: bytes = UNKNOWN_TENANT,
    ) -> None:
        """Announce a store of a node's KV pages, about to be queued. Scheduler thread."""
        self._pending.announce_store(
            hashes, num_tokens=num_tokens, prefix_tokens=prefix_tokens, tenant=tenant
        )

    def drop_queued(self, tenant: bytes | None) -> None:
        """Drop the queued stores of a tenant (None: every one), and what is left of its operation
        under way. The caller holds ``lock``."""
        self._pending.drop_tenant(tenant)
        self._has_dropped = True
        if tenant is None or tenant == self.tenant:
            self._num_admitted = 0

    @property
    def dropped_as(self) -> Outcome:
        """Return why the operation decided last was not admitted whole, if it was not."""
        return self._admission.dropped_as

    @property
    def takes_everything(self) -> bool:
        """Whether any operation that does not wait would be admitted."""
        self._charge()
        return self._admission.would_open

    def wants_ancestors(self, chain_tokens: int) -> bool:
        """Whether dropped parts of a chain of this length are worth offering again."""
        is_selective = self._admission.level is Level.SELECTIVE
        return is_selective and self._admission.is_long(chain_tokens)

    def offer_again(self, hashes: Sequence[str], *, prefix_tokens: int) -> bool:
        """Whether to queue the pages of a node once more, as part of a chain that became long.

        Pages that still wait are not queued twice: from now on they count as part of it.
        """
        if not hashes or self._pending.lengthen_chain(hashes[0], prefix_tokens):
            return False
        return self._engine.lookup([bytes.fromhex(hashes[-1])]).stop is Stop.MISS

    def tree_was_reset(self) -> None:
        """Drop what was announced: SGLang emptied its queue."""
        self._pending.clear()
        self._has_dropped = False

    def num_admitted(self, hashes: Sequence[str], *, is_kv: bool) -> int:
        """Return how many leading pages of one call to store."""
        if not hashes:
            return 0
        if not self._continues(hashes, is_kv=is_kv):
            store = self._pending.take_store(hashes)
            self.tenant = UNKNOWN_TENANT if store is None else store.tenant or UNKNOWN_TENANT
            if store is not None and store.tenant is None:
                self._begin(store.hashes, 0)
            elif store is not None:
                self.waited_s = store.waited_s
                pinned_share = store.tokens_behind / self._host_tokens
                backlog = backlog_pressure(store.waited_s, pinned_share)
                self._decide(store.hashes, store.prefix_tokens, backlog)
            elif self._has_dropped:  # whose it is is not known any more
                self._begin(hashes, 0)
            elif is_kv:
                self._decide(tuple(hashes), 0, None)
            else:  # whether its KV will be stored is not known
                return len(hashes) if self._admission.level is Level.OPEN else 0
        if self.blocked and (
            self.tenant == UNKNOWN_TENANT or not self.blocked.isdisjoint((None, self.tenant))
        ):
            self._num_admitted = 0
        if self.hidden or self.heard:
            is_hidden = (each in self.hidden or each in self.heard for each in hashes)
            num_visible = next((at for at, each in enumerate(is_hidden) if each), -1)
            if num_visible >= 0:
                self._num_admitted = min(
                    self._num_admitted, self._positions[hashes[0]] + num_visible
                )
        num_left = max(0, self._num_admitted - self._positions[hashes[0]])
        if is_kv:
            # SGLang goes on with an operation only while all of it is stored.
            self._next_kv = self._next_kv + len(hashes) if num_left >= len(hashes) else -1
        return min(len(hashes), num_left)

    def _continues(self, hashes: Sequence[str], *, is_kv: bool) -> bool:
        """Whether a call belongs to the operation that was decided last."""
        if hashes[0] not in self._positions or hashes[-1] not in self._positions:
            return False
        return self._next_kv == (self._positions[hashes[0]] if is_kv else 0)

    def _decide(self, hashes: tuple[str, ...], prefix_tokens: int, backlog: float | None) -> None:
        keys = [bytes.fromhex(text) for text in hashes]
        num_unwritten = self._charge()
        num_admitted = self._admission.decide(
            keys,
            prefix_tokens=prefix_tokens,
            page_bytes=self._page_bytes,
            num_held=lambda: self._engine.lookup(keys).num_hits,
            backlog=backlog,
            num_unwritten=num_unwritten,
        )
        self._begin(hashes, num_admitted)
        self._log_level()

    def _begin(self, hashes: Sequence[str], num_admitted: int) -> None:
        self._num_admitted = num_admitted
        self._positions = {text: position for position, text in enumerate(hashes)}
        self._next_kv = 0

    def _charge(self) -> int:
        """Spend what the device was given since the last call; return the bytes of stores that it
        had not been given whole by then. Any thread."""
        if self._admission.budget_bytes is None:
            return 0
        with self._charging:
            stats = self._engine.stats()  # once: a store that ends between two is in neither
            self._admission.spend(stats.bytes_written - self._bytes_written)
            self._bytes_written = stats.bytes_written
            return stats.queued_store_bytes

    def _log_level(self) -> None:
        level, now = self._admission.level, self._clock()
        if level is not self._logged_level and now >= self._next_log:
            self._logged_level, self._next_log = level, now + LOG_INTERVAL_S
            logger.info("NVMe tier admission is %s now", level.value)
