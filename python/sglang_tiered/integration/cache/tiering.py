"""``Tiering`` decides over a cache's tiers.

It is made once, when SGLang has built the host tier and opened the storage, and lives as long as
the cache. An operator may detach the storage and attach it again: an act of ``Tiering`` looks once
whether there is one, and its parts are handed it. Scheduler thread only; nothing here waits for a
disk, but for the start and the end.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_tiered.integration.cache.hints import DETACHED, Hints
from sglang_tiered.integration.cache.host_copies import HostCopies
from sglang_tiered.integration.cache.host_locks import Residents
from sglang_tiered.integration.cache.load_scheduler import LoadScheduler
from sglang_tiered.integration.cache.returns import Returns
from sglang_tiered.integration.cache.small_host import COPY_SHARE
from sglang_tiered.integration.cache.spiller import Spiller
from sglang_tiered.integration.ranks import first_ranks
from sglang_tiered.policy.queue_wait import PrefillWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

    from sglang_tiered.integration.cache.hiding_cache import HidingCache
    from sglang_tiered.integration.cache.load_planner import LoadPlanner
    from sglang_tiered.integration.observe.stories import Stories
    from sglang_tiered.integration.ranks import RankAgreement
    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.policy.shares import HostBudget


MIN_COST_S = 1e-6


class Tiering:
    """Decides on loads, on copies to host memory, on stores, and on what stays in host memory."""

    def __init__(
        self,
        cache: HidingCache,
        storage: TieredStorage,
        planner: LoadPlanner[CacheRequestHandle],
        agreement: RankAgreement,
        budget: HostBudget,
        *,
        notes: Stories,
    ) -> None:
        self._cache = cache
        self.planner = planner
        self.notes = notes
        self.copies = HostCopies(cache, waiting_stores=self._waiting_stores)
        self.returns = Returns(cache, planner, notes)
        self.loads = LoadScheduler(
            cache,
            planner,
            agreement,
            self.copies,
            self.returns,
            window_tokens=budget.loading_tokens,
            notes=notes,
        )
        self.residents = Residents(cache, budget.resident_tokens, self.cost_to_bring_back)
        self.stores = Spiller(
            cache,
            self.copies,
            budget,
            num_loading=self.loads.num_tokens,
        )
        self.hints = Hints(
            cache,
            self.loads,
            self.copies,
            budget.hinted_tokens,
            window_tokens=budget.loading_tokens,
        )
        self._num_copied = 0  # to the device, for the next batch
        self.work = PrefillWork()
        # Tells routers the costs, of a scheduler that will be away for so many seconds; once there
        # is one, if anybody is told.
        self.publish_costs: Callable[[float], None] | None = None
        storage.use_planner(planner)
        storage.meter_of = notes.meter_of
        if cache.has_small_host:
            core = cache.tree_core
            core.max_copy_tokens = max(cache.page_size, int(budget.host_tokens * COPY_SHARE))
            core.may_give_up = lambda node_id: not self.stores.queue.is_under_way(node_id)
            core.is_stored = self._is_stored if cache.decides_alone else None

    @property
    def agreement(self) -> RankAgreement:
        """The agreement between ranks that loads and erasures use."""
        return self.loads.agreement

    # ---- Attached and detached ----

    def attached(self, storage: TieredStorage) -> None:
        """Use tiers that an operator attached again."""
        self.planner.drop_reads()
        storage.use_planner(self.planner)
        storage.meter_of = self.notes.meter_of

    def detached(self) -> None:
        """Let go of tiers that an operator detached; SGLang has dropped the stores under way."""
        self.hints.end_all(DETACHED)
        self.loads.detached()
        self.returns.drop_all()
        self.stores.detached()

    # ---- Stores ----

    def offer_store(self, node_id: int) -> bool:
        """Queue the store of a node, for which SGLang asks, in its turn. Returns False if SGLang
        shall queue it itself."""
        storage = self._cache.storage
        if storage is None or not self._cache.tree_core.is_backuped(node_id):
            return False
        self.stores.offer_node(node_id, storage)
        return True

    def store_soon(self, path: Any) -> None:
        """Store the nodes of a path soon: a checkpoint waits for them."""
        storage = self._cache.storage
        if storage is not None:
            self.stores.store_soon(path, storage)

    @property
    def awaits_stores(self) -> bool:
        """Whether nodes wait for their store, of which a reset of the tree would drop all. Not if
        NVMe takes none. Alike on all ranks: where several must agree none waits."""
        storage = self._cache.storage
        return bool(self.stores.queue) and storage is not None and bool(storage.takes_stores)

    def stores_ended(self, results: Sequence[Any]) -> None:
        """Free what stores held on to, once SGLang has taken their results."""
        storage = self._cache.storage
        self.copies.stores_ended()
        self.stores.ended(results, 0.0 if storage is None else storage.gate.waited_s)

    # ---- What stays in host memory ----

    def unlock_one(self, *, is_base: bool) -> bool:
        """Let one thing that was kept be evicted; return False if nothing is kept. Residents go
        before what NVMe does not hold yet. What was loaded for waiting requests stays, since the
        window bounds it; but it may take all memory of other components' states, so there the last
        load goes too. A hint loads no more at that price."""
        self.hints.note_memory_is_short()
        return (
            self.residents.dismiss_one()
            or self.stores.release_pin()
            or (not is_base and self.loads.unlock_last_loaded())
        )

    def take_copied(self) -> int:
        """Return how many tokens were copied to the device for the batch that runs now."""
        num_copied, self._num_copied = self._num_copied, 0
        return num_copied

    def prefill_begins(self, spans: Sequence[tuple[int, int]], now: float) -> None:
        """Note the launch of a prefill batch of ``(new tokens, tokens before them)``."""
        prefill = self.planner.costs.prefill
        expected_s = prefill.prices[0] + sum(prefill.seconds(*span) for span in spans)
        self.work.launched(expected_s, now)
        if self.publish_costs is not None:
            self.publish_costs(expected_s)

    def prefill_ended(self, now: float) -> None:
        """Note the end of the first prefill batch that was launched and has not ended."""
        self.work.ended(now)

    def loaded_back(self, params: Any, num_tokens: int) -> None:
        """Note the use of a prefix that was matched, and of which so many tokens are copied to the
        device."""
        self._num_copied += num_tokens
        if params.req is not None:
            self.notes.copied(params.req, num_tokens)
        node_id, core = params.best_match_node, self._cache.tree_core
        path = core.collect_path_info([node_id])[0]
        if params.req is not None and path:
            hashes = [core.get_last_hash_value(node.node_id) for node in path]
            self.hints.note_use(hashes)
        self.residents.note_use(node_id)

    def cost_to_bring_back(self, node_id: int, chain: str, num_tokens: int) -> float:
        """Return the seconds per token to restore a chain once it left host memory: a load if NVMe
        holds it or is about to, else a prefill. Where ranks must agree, all chains cost the
        same."""
        storage = self._cache.storage
        if storage is None or not self._cache.decides_alone:
            return 1.0
        is_held = self.stores.queue.is_under_way(node_id) or storage.holds(chain)
        costs = self.planner.costs
        seconds = (
            costs.load_seconds((num_tokens,)) if is_held else costs.prefill.seconds(num_tokens, 0)
        )
        return max(seconds, MIN_COST_S) / num_tokens

    def _waiting_stores(self) -> list[int]:
        return self.stores.queue.waiting()

    def _is_stored(self, hashes: Sequence[str]) -> bool:
        storage = self._cache.storage
        return storage is not None and storage.num_kept(hashes) == len(hashes)

    # ---- Steps and ends ----

    def ask_ranks(self) -> None:
        """Ask at the beginning of a step what all ranks must know at its end."""
        storage = self._cache.storage
        if storage is not None and storage.remote_erasures is not None:
            storage.remote_erasures.ask(self.agreement)

    def step(self) -> None:
        """Do the work of one scheduler step, after SGLang took note of what has ended."""
        storage, hide = self._cache.storage, self._cache.hide_heard
        self.notes.step()
        if self._cache.hidden_pages.are_too_many and hide is not None:
            hide(())
        if self.publish_costs is not None:
            self.publish_costs(0.0)
        self.copies.begin_step()
        self.loads.step()
        self.returns.step()
        if storage is None:
            self.copies.retry()
            return
        self.stores.step(storage)
        storage.settle_namespace()
        self.hints.step(storage)
        self.hide_heard()

    def hide_heard(self) -> None:
        """Hide in memory what other servers erased. Every rank calls it at the same moment."""
        storage, hide = self._cache.storage, self._cache.hide_heard
        if storage is not None and storage.remote_erasures is not None and hide is not None:
            share = partial(first_ranks, self._cache)
            storage.remote_erasures.step(self.agreement, share, hide)

    def tree_was_reset(self) -> None:
        """Drop the nodes and locks of a tree that was emptied."""
        self.loads.clear()
        self.returns.clear()
        self.copies.clear()
        self.stores.clear()
        self.residents.clear()
        self.hints.tree_was_reset()

    def memory_was_hidden(self) -> None:
        """Let go of what was kept in memory: requests go by other keys now, and find none of it."""
        self.returns.drop_all()  # a chunked request keeps its key
        self._cache.drop_loads()
        while self.residents.dismiss_one():
            pass

    def close(self) -> None:
        """Write the last lines of requests; no request may run. Waits for the disk."""
        self.notes.close()
