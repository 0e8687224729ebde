"""``StoreGate``: admits the stores of one rank to NVMe, each node as a whole.

The store of a radix node begins as several parts: of the other pools first, then of KV. A page of
another pool is useless without its KV, and a KV page is useless behind a missing one. So the first
part decides for all: a number of leading pages.

With several ranks each decides by its own disk. Where they differ, a page that some lack is a miss
for all, as SGLang takes the minimum over the ranks.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tiered.budgets import DailyBudget
from sglang_tiered.integration.identity.tenants import UNKNOWN_TENANT
from sglang_tiered.policy.admission import Admission, Level, Outcome, backlog_pressure
from sglang_tiered.storage.base import Stop

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from sglang_tiered.storage.base import TierEngine


LOG_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class QueuedStore:
    """The store of a node, from when it is queued until it has ended. Sizes are tokens."""

    hashes: Sequence[str]  # of its KV pages
    num_tokens: int
    prefix_tokens: int  # of the chain that it ends
    tenant: bytes
    since: float
    kv: QueuedStore | None = None  # of the same pages, where another pool goes by itself
    num_admitted: int | None = None  # leading pages; None: it has not begun
    dropped_as: Outcome = Outcome.DROPPED_FIRST_TOUCH  # if not all were admitted


class StoreGate:
    """Admits stores to NVMe. ``num_admitted`` and ``refuse`` run on the backup thread, the rest on
    the scheduler thread. Nothing here waits for I/O.

    ``waited_s`` is how long the store that began last had waited; any thread may read it. ``lock``
    is held by the backup thread from asking until what it stores is submitted, so that an erasure
    comes before or after both."""

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
        budget = None if writes_per_day is None else DailyBudget(writes_per_day, clock)
        self._admission = Admission(budget=budget)
        self._charging = threading.Lock()
        self._bytes_written = engine.stats().bytes_written
        self.waited_s = 0.0
        self._table = threading.Lock()  # a leaf, held for work on these
        self._stores: dict[QueuedStore, None] = {}  # that have not ended
        self._waiting: dict[str, QueuedStore] = {}  # that have not begun, by first page
        self._waiting_tokens = 0
        self.lock = threading.RLock()
        # Tenants whose pages are not stored now; None: all. The setter must erase them afterwards.
        self.blocked: frozenset[bytes | None] = frozenset()
        # Hashes of pages that memory hides, and of those that it will hide: none is stored. The
        # setter must erase them in the tiers after each change.
        self.hidden: Container[str] = frozenset()
        self.heard: Container[str] = frozenset()
        self._logged_level, self._next_log = Level.OPEN, clock()

    @property
    def outcomes(self) -> dict[Outcome, int]:
        return self._admission.outcomes

    @property
    def budget_bytes(self) -> float | None:
        """Return what the write budget leaves for now; None without a budget."""
        return self._admission.budget_bytes

    def queue_store(
        self,
        hashes: Sequence[str],
        *,
        num_tokens: int,
        prefix_tokens: int = 0,
        tenant: bytes = UNKNOWN_TENANT,
        kv: QueuedStore | None = None,
    ) -> QueuedStore:
        """Queue the store of a node's pages, which end a chain of ``prefix_tokens``. ``kv``: of
        another pool alone, whose pages are of use with these."""
        store = QueuedStore(hashes, num_tokens, prefix_tokens, tenant, self._clock(), kv)
        with self._table:
            self._stores[store] = None
            self._waiting_tokens += num_tokens
            if hashes:
                self._waiting.setdefault(hashes[0], store)
        return store

    def store_ended(self, store: QueuedStore) -> None:
        """Drop a store that has ended. Any thread."""
        self._begin(store)
        with self._table:
            self._stores.pop(store, None)

    def drop_queued(self, tenant: bytes | None) -> None:
        """Drop the queued stores of a tenant (None: every one), and what has not begun of those
        under way. Those of an unknown tenant may be its own. The caller holds ``lock``."""
        with self._table:
            stores = list(self._stores)
        for store in stores:
            if tenant is None or store.tenant in (tenant, UNKNOWN_TENANT):
                self.refuse(store)

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
        if not hashes:
            return False
        with self._table:
            waiting = self._waiting.get(hashes[0])
            if waiting is not None:
                waiting.prefix_tokens = max(waiting.prefix_tokens, prefix_tokens)
                return False
        return self._engine.lookup([bytes.fromhex(hashes[-1])]).stop is Stop.MISS

    def tree_was_reset(self) -> None:
        """Drop all stores: SGLang emptied its queue."""
        with self._table:
            self._stores.clear()
            self._waiting.clear()
            self._waiting_tokens = 0

    def num_admitted(self, store: QueuedStore, hashes: Sequence[str]) -> int:
        """Return how many leading pages of a part to store, which is of any pool."""
        if store.num_admitted is None:
            self._decide(store)
        assert store.num_admitted is not None
        if self.blocked and (
            store.tenant == UNKNOWN_TENANT or not self.blocked.isdisjoint((None, store.tenant))
        ):
            store.num_admitted = 0
        position = store.hashes.index(hashes[0])
        if self.hidden or self.heard:
            is_hidden = (each in self.hidden or each in self.heard for each in hashes)
            num_visible = next((at for at, each in enumerate(is_hidden) if each), -1)
            if num_visible >= 0:
                store.num_admitted = min(store.num_admitted, position + num_visible)
        return min(len(hashes), max(0, store.num_admitted - position))

    def refuse(self, store: QueuedStore) -> None:
        """Admit nothing more of a store. The caller holds ``lock``."""
        self._begin(store)
        store.num_admitted = 0

    def _begin(self, store: QueuedStore) -> None:
        """Count a store no more among those that wait."""
        with self._table:
            if store.num_admitted is None and store in self._stores:
                self._waiting_tokens -= store.num_tokens
                if store.hashes and self._waiting.get(store.hashes[0]) is store:
                    del self._waiting[store.hashes[0]]

    def _decide(self, store: QueuedStore) -> None:
        self._begin(store)
        self.waited_s = self._clock() - store.since
        kv = store.kv
        if kv is not None and kv.num_admitted is not None and store.hashes[0] in kv.hashes:
            start = kv.hashes.index(store.hashes[0])
            store.num_admitted = min(len(store.hashes), max(0, kv.num_admitted - start))
            return
        keys = [bytes.fromhex(text) for text in store.hashes]
        num_unwritten = self._charge()
        store.num_admitted = self._admission.decide(
            keys,
            prefix_tokens=store.prefix_tokens,
            page_bytes=self._page_bytes,
            num_held=lambda: self._engine.lookup(keys).num_hits,
            backlog=backlog_pressure(self.waited_s, self._waiting_tokens / self._host_tokens),
            num_unwritten=num_unwritten,
        )
        store.dropped_as = self._admission.dropped_as
        self._log_level()

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
