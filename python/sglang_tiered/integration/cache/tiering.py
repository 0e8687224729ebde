"""``Tiering`` decides over a cache's tiers.

It is made once, when SGLang has built the host tier and opened the storage, and lives as long as
the cache. An operator may detach the storage and attach it again: an act of ``Tiering`` looks once
whether there is one, and its parts are handed it. Scheduler thread only; nothing here waits for a
disk, but for the start and the end.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_tiered.integration.cache.hiding_cache import HostLocks
from sglang_tiered.integration.cache.hints import DETACHED, Hints
from sglang_tiered.integration.cache.load_scheduler import LoadScheduler
from sglang_tiered.integration.cache.prefill_times import make_planner
from sglang_tiered.integration.cache.returns import Returns
from sglang_tiered.integration.cache.small_host import COPY_SHARE
from sglang_tiered.integration.cache.spiller import Spiller
from sglang_tiered.integration.observe.stories import open_notes
from sglang_tiered.integration.ranks import RankAgreement, first_ranks
from sglang_tiered.policy.queue_wait import PrefillWork
from sglang_tiered.policy.residents import ResidentSet
from sglang_tiered.policy.shares import HostBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.config import TieredConfig
    from sglang_tiered.integration.cache.hiding_cache import HidingCache
    from sglang_tiered.integration.storage.backend import TieredStorage


MIN_COST_S = 1e-6


class Residents:
    """``ResidentSet`` over SGLang's tree; the scheduler thread's. A chain goes by the hash of its
    last page, which a node keeps when the tree splits it.

    ``cost_of``: seconds per token to bring a chain back that ends in a node with this hash and is
    so many tokens long.
    """

    def __init__(
        self, cache: HidingCache, capacity: int, cost_of: Callable[[int, str, int], float]
    ) -> None:
        self._core = cache.tree_core
        self._set: ResidentSet[str] = ResidentSet(capacity)
        self._cost_of = cost_of
        self._pins: HostLocks[str] = HostLocks(cache)

    @property
    def num_tokens(self) -> int:
        return self._set.num_tokens

    def offer_node(self, node_id: int) -> None:
        """Pin the chain that ends in a node, if it is to stay: the node was copied to host memory
        or loaded back."""
        if not self._core.is_backuped(node_id):
            return
        chain = self._core.get_last_hash_value(node_id)
        path = self._core.collect_path_info([node_id])[0]
        if chain is None or not path:
            return
        num_tokens = path[-1].path_end
        cost = self._cost_of(node_id, chain, num_tokens)
        hashes = [self._core.get_last_hash_value(node.node_id) for node in path[:-1]]
        beginnings = [each for each in hashes if each is not None]
        offer = self._set.offer_chain(chain, num_tokens, cost, beginnings)
        for dismissed in offer.dismissed:
            self._pins.unlock(dismissed)
        if offer.accepted:
            self._pins.lock(chain, node_id)

    def note_use(self, node_id: int) -> None:
        """Note that a chain was loaded back. A longer prompt uses the residents among its
        prefixes."""
        for node in self._core.collect_path_info([node_id])[0]:
            if self._core.get_last_hash_value(node.node_id) in self._set:
                self.offer_node(node.node_id)
        self.offer_node(node_id)

    def note_eviction(self, num_tokens: int) -> None:
        """Note that the tier evicted so many tokens of others."""
        self._set.note_eviction(num_tokens)

    def dismiss_one(self) -> bool:
        """Unpin the resident that is worth least; False if there is none."""
        chain = self._set.evict_chain()
        if chain is None:
            return False
        self._pins.unlock(chain)
        return True

    def clear(self) -> None:
        """Drop all residents: the tree was emptied."""
        self._set.clear()
        self._pins.clear()


class Tiering:
    """Decides on loads, on copies to host memory, on stores, and on what stays in host memory."""

    def __init__(
        self, cache: HidingCache, storage: TieredStorage, config: TieredConfig | None
    ) -> None:
        self._cache = cache
        nvme = None if config is None else config.nvme
        self.planner = make_planner(cache, storage, always=nvme is not None and nvme.always_load)
        log = None if config is None else config.request_log
        self.notes = open_notes(log, self.planner, cache.hidden_tenants.tenant_of)
        budget = HostBudget(
            int(cache.cache_controller.mem_pool_host.logical_size),
            int(cache.token_to_kv_pool_allocator.size_full),
            is_small=cache.has_small_host or cache.buffer_pipeline is not None,
        )
        window_tokens = budget.loading_tokens
        self.stores = Spiller(cache, budget, num_loading=self._num_loading)
        self.returns = Returns(cache, self.planner, self.notes)
        self.loads = LoadScheduler(
            cache,
            self.planner,
            RankAgreement.of_cache(cache),
            self.stores,
            self.returns,
            window_tokens=window_tokens,
            notes=self.notes,
        )
        self.residents = Residents(cache, budget.resident_tokens, self.cost_to_bring_back)
        self.hints = Hints(
            cache, self.loads, self.stores, budget.hinted_tokens, window_tokens=window_tokens
        )
        self._num_copied = 0  # to the device, for the next batch
        self.work = PrefillWork()
        # Tells routers the costs, of a scheduler that will be away for so many seconds; once there
        # is one, if anybody is told.
        self.publish_costs: Callable[[float], None] | None = None
        self.attached(storage)
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
        """Use tiers, at the start or when an operator attached them again."""
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

    @property
    def awaits_stores(self) -> bool:
        """Whether nodes wait for their store, of which a reset of the tree would drop all. Not if
        NVMe takes none. Alike on all ranks: where several must agree none waits."""
        storage = self._cache.storage
        return bool(self.stores.queue) and storage is not None and bool(storage.takes_stores)

    def stores_ended(self, results: Sequence[Any]) -> None:
        """Free what stores held on to, once SGLang has taken their results."""
        storage = self._cache.storage
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

    def _num_loading(self) -> int:
        return self.loads.num_tokens()

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
        self.stores.begin_step()
        self.loads.step()
        self.returns.step()
        self.stores.step(storage)
        if storage is None:
            return
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
