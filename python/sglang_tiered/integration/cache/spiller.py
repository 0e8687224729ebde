"""``Spiller``: hands dirty radix nodes to the storage thread, in the order ``SpillQueue`` decides.

SGLang asks for the store of a node once, when its copy to host memory is complete, and each store
that is queued pins its host pages until it is done. So a slow disk would fill host memory with
pinned pages, and what admission dropped would never be offered again. Here a node waits unqueued
until its turn, and what was dropped or failed is offered again while the disk is idle.

A waiting node is an id of SGLang's tree. Ids are never used twice; one that is gone raises
``KeyError``, which is how a node that was evicted meanwhile is noticed. A node that was split keeps
its id for the suffix, and the prefix gets a new one: so a node's turn is the turn of all nodes on
its path behind the point where it began. Nothing but ids, hashes and token counts is kept.

Several ranks must queue the same stores in the same order, and when a store finishes depends on the
local disk. A scheduler that does not decide alone therefore queues every store at once, as SGLang
does. Retries of skipped host copies depend on host memory and on whose store ended, which are the
same on all ranks, and run everywhere.

Everything runs on the scheduler thread, in bounded work per step, and waits for nothing.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sglang_tiered.policy.admission import TouchMemory
from sglang_tiered.policy.spill import SpillQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
        TreePathNodeInfo,
        UnifiedTreeCoreInterface,
    )

    from sglang_tiered.integration.storage.backend import TieredStorage

__all__ = ["Spiller"]

MAX_STORES_PER_STEP = 2
"""About 55 us each. A step that computes anything takes far longer than a disk does for two."""

MAX_ANCESTORS = 4
"""Nodes above one whose turn it is that are stored with it, since it would be of no use alone."""

MAX_COPIES_PER_STEP = 4
"""Of those that were skipped. Of a host tier that is small, they are all of it."""

MAX_LOOKS_PER_STEP = 32
"""Nodes taken in a step, most of them gone when many are: about 1 us each."""

NUM_SAMPLED_PAGES = 16
"""Leading pages of a node that are looked up to see whether it was computed before."""
NUM_REMEMBERED_PAGES = 1 << 18

PIN_SHARE, LOADING_SHARE = 1 / 6, 1 / 2
"""Of what host memory holds beyond device memory: dirty nodes may pin a sixth, and of the half that
loads may fill what they do not."""

RETRY_S, RETRY_GROWTH, MAX_RETRIES, MAX_REMEMBERED = 5.0, 4, 3, 4096
MAX_PAUSE_STEPS = 64


@dataclass(slots=True)
class _Dirty:
    """A node as it was when it was offered."""

    chain: str  # hash of its last page, which names everything up to it
    path_start: int
    path_end: int
    num_retries: int = 0
    due: float = 0.0  # when it may be offered again

    @property
    def num_tokens(self) -> int:
        return self.path_end - self.path_start


class SpillingCache(Protocol):
    """What the spiller asks of its cache. The first six are SGLang's."""

    tree_core: UnifiedTreeCoreInterface
    tree_components: Sequence[Any]
    ongoing_backup: Mapping[int, Any]
    ongoing_prefetch: Collection[Any]

    def inc_host_lock_ref(self, node_id: int) -> Any: ...
    def dec_host_lock_ref(self, node_id: int, params: DecLockRefParams) -> Any: ...

    @property
    def has_small_host(self) -> bool: ...
    @property
    def decides_alone(self) -> bool: ...
    @property
    def lets_loads_go_first(self) -> bool: ...

    def tenant_of(self, node_id: int) -> bytes: ...
    def num_loading_tokens(self) -> int: ...
    def queue_store(self, node_id: int) -> int | None: ...
    def back_up(self, node_id: int) -> bool: ...
    def store_ended(self, chain: str, num_tokens: int, *, is_held: bool) -> None: ...


class Spiller:
    """One per cache. ``own_tokens``: what host memory holds beyond device memory."""

    def __init__(
        self,
        cache: SpillingCache,
        *,
        host_tokens: int,
        own_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._own_tokens = own_tokens
        self._clock = clock
        self._queue = SpillQueue[int](host_tokens, clock)
        self._dirty: dict[int, _Dirty] = {}
        self._locks: dict[int, DecLockRefParams] = {}
        self._flying: dict[int, tuple[int, _Dirty]] = {}  # operation to node
        self._flying_nodes: set[int] = set()
        self._dropped: OrderedDict[int, _Dirty] = OrderedDict()
        self._touches = TouchMemory(NUM_REMEMBERED_PAGES)
        self._skipped: OrderedDict[int, None] = OrderedDict()
        self._pause_steps = self._next_pause = 0
        # A pin of another component's state could starve a pool whose eviction knows no pins.
        # In a small host tier what waits for its store keeps its copy anyway.
        self._may_pin = len(cache.tree_components) == 1 and not cache.has_small_host

    @property
    def queue(self) -> SpillQueue[int]:
        """For metrics and tests."""
        return self._queue

    def waiting(self) -> Iterable[int]:
        """Nodes that wait for their store."""
        return self._dirty.keys()

    def is_under_way(self, node_id: int) -> bool:
        """Whether a node waits for its store, or for the end of it."""
        return node_id in self._queue or node_id in self._flying_nodes

    # ---- What SGLang asks for ----

    def offer(self, node_id: int, storage: TieredStorage) -> None:
        """A node's host copy is complete: store it in its turn."""
        core = self._cache.tree_core
        path = core.collect_path_info([node_id])[0]
        node = path[-1]
        hashes = core.get_hash_values(node_id)
        if not self._cache.decides_alone or not hashes:
            self._announce(node, hashes, node.path_end, storage)
            self._cache.queue_store(node_id)
            return
        for ancestor in path[:-1]:
            self._queue.promote(ancestor.node_id)
        sample = [bytes.fromhex(text) for text in hashes[:NUM_SAMPLED_PAGES]]
        returned = self._touches.num_seen(sample) > 0
        dropped = self._dropped.pop(node_id, None)
        dirty = _Dirty(hashes[-1], node.path_start, node.path_end)
        if dropped is not None and self._cache.has_small_host:
            dirty.num_retries = dropped.num_retries  # copied again for this retry
        self._wait(node_id, dirty, returned=returned)

    def _wait(self, node_id: int, dirty: _Dirty, *, returned: bool) -> None:
        self._dirty[node_id] = dirty
        given_up = self._queue.add(node_id, dirty.num_tokens, returned=returned)
        if given_up is not None:
            self._dirty.pop(given_up)
            self._unlock(given_up)
        if self._may_pin and node_id not in self._locks:
            self._locks[node_id] = self._cache.inc_host_lock_ref(node_id).to_dec_params()
            self._queue.pin(node_id, dirty.num_tokens)
            self._limit_pins()

    def backup_skipped(self, node_id: int) -> None:
        """Host memory was short: a node stays on the device without a host copy."""
        self._skipped[node_id] = None
        if len(self._skipped) > MAX_REMEMBERED:
            self._skipped.popitem(last=False)

    def stores_ended(self) -> None:
        """SGLang has taken the results of stores, on all ranks those of the same: what they read
        may give way now, to copies that were skipped."""
        self._pause_steps = self._next_pause = 0

    # ---- Every step ----

    def step(self, storage: TieredStorage | None) -> None:
        """Bounded work of one scheduler step."""
        if storage is not None and self._flying:
            self._reap(storage)  # first, since what was stored makes room for copies
        if self._skipped and not self._cache.lets_loads_go_first:
            self._back_up_again(storage)
        if storage is None:
            self.abandon()
            return
        if self._queue:
            self._begin(storage)
        elif self._dropped and not self._flying:
            self._offer_again(storage)
        storage.ledger.waiting_tokens = self._queue.waiting_tokens
        storage.ledger.flight_tokens = self._queue.flight_tokens

    def _reap(self, storage: TieredStorage) -> None:
        """Notice the stores whose result SGLang has taken."""
        ongoing = self._cache.ongoing_backup
        num_flying = len(self._flying)
        while (operation := self._queue.oldest_operation) is not None and operation not in ongoing:
            self._queue.finished()
            node_id, dirty = self._flying.pop(operation)
            self._flying_nodes.discard(node_id)
            is_held = storage.holds(dirty.chain)
            if not is_held or dirty.num_retries:
                self._cache.store_ended(dirty.chain, dirty.path_end, is_held=is_held)
            if not is_held:
                self._remember(node_id, dirty)
        if len(self._flying) < num_flying:
            self._queue.adapt(storage.gate.waited_s)

    def _begin(self, storage: TieredStorage) -> None:
        if not storage.takes_stores:
            return  # a sick disk: nothing is lost by waiting
        loads_wait = bool(self._cache.ongoing_prefetch)
        num_stores = 0
        for _ in range(MAX_LOOKS_PER_STEP):
            node_id = self._queue.take(loads_wait=loads_wait)
            if node_id is None:
                break
            num_stores += self._store(node_id, storage)
            if num_stores >= MAX_STORES_PER_STEP:
                break

    def _store(self, node_id: int, storage: TieredStorage) -> int:
        """Queue the stores of a node whose turn it is; how many."""
        dirty = self._dirty.pop(node_id)
        try:
            path = self._cache.tree_core.collect_path_info([node_id])[0]
        except KeyError:  # evicted, and counted when its pages were freed
            return 0
        chain_tokens = path[-1].path_end
        own = next(at for at, node in enumerate(path) if node.path_end > dirty.path_start)
        nodes = [*self._missing_ancestors(path[:own], chain_tokens, storage), *path[own:]]
        for node in nodes:
            self._hand_over(node, chain_tokens, dirty.num_retries, storage)
        self._unlock(node_id)  # now that the stores hold locks of their own
        return len(nodes)

    def _missing_ancestors(
        self, path: tuple[TreePathNodeInfo, ...], chain_tokens: int, storage: TieredStorage
    ) -> list[TreePathNodeInfo]:
        """Ancestors that NVMe does not hold (admission dropped them while the chain was short, or
        they were given up): without them the tier could not serve what is below."""
        gate, core = storage.gate, self._cache.tree_core
        missing: list[TreePathNodeInfo] = []
        if not gate.takes_everything and not gate.wants_ancestors(chain_tokens):
            return missing
        chains = [core.get_last_hash_value(node.node_id) or "" for node in path]
        at = 0
        while len(missing) < MAX_ANCESTORS:
            at += storage.num_kept(chains[at:])
            if at >= len(path):
                break
            node = path[at]
            hashes = core.get_hash_values(node.node_id)
            if node.node_id not in self._queue and gate.offer_again(
                hashes, prefix_tokens=chain_tokens
            ):
                missing.append(node)
            at += 1
        return missing

    def _hand_over(
        self, node: TreePathNodeInfo, chain_tokens: int, num_retries: int, storage: TieredStorage
    ) -> None:
        node_id = node.node_id
        core = self._cache.tree_core
        if not core.is_backuped(node_id):
            return
        hashes = core.get_hash_values(node_id)
        self._dropped.pop(node_id, None)
        self._announce(node, hashes, chain_tokens, storage)
        operation = self._cache.queue_store(node_id)
        if operation is None:
            return
        dirty = _Dirty(hashes[-1], node.path_start, node.path_end, num_retries)
        self._queue.began(operation, dirty.num_tokens)
        self._flying[operation] = node_id, dirty
        self._flying_nodes.add(node_id)

    def _announce(
        self, node: TreePathNodeInfo, hashes: list[str], chain_tokens: int, storage: TieredStorage
    ) -> None:
        storage.gate.announce(
            hashes,
            num_tokens=node.path_end - node.path_start,
            prefix_tokens=chain_tokens,
            tenant=self._cache.tenant_of(node.node_id),
        )

    # ---- What was dropped, and may be offered again ----

    def _remember(self, node_id: int, dirty: _Dirty) -> None:
        if dirty.num_retries >= MAX_RETRIES:
            return
        dirty.due = self._clock() + RETRY_S * RETRY_GROWTH**dirty.num_retries
        dirty.num_retries += 1
        self._dropped[node_id] = dirty
        if len(self._dropped) > MAX_REMEMBERED:
            self._dropped.popitem(last=False)

    def _offer_again(self, storage: TieredStorage) -> None:
        """One node a step, while nothing else wants the disk."""
        node_id, dirty = next(iter(self._dropped.items()))
        if self._clock() < dirty.due:
            return
        if self._cache.ongoing_prefetch or not storage.gate.takes_everything:
            return
        if not storage.takes_stores:
            return
        del self._dropped[node_id]
        try:
            is_there = self._cache.tree_core.is_backuped(node_id)
        except KeyError:
            return
        if storage.holds(dirty.chain):
            return
        if is_there:
            self._wait(node_id, dirty, returned=False)
        elif self._cache.has_small_host:  # which let the copy go; the next one brings the offer
            self._remember(node_id, dirty)
            self.backup_skipped(node_id)

    # ---- Host copies that were skipped for lack of host memory ----

    def _back_up_again(self, storage: TieredStorage | None) -> None:
        """Try the skipped nodes until one fails, then pause, longer after each failure. Counts
        steps and stores, not seconds, so that all ranks try at the same time."""
        if self._pause_steps > 0:
            self._pause_steps -= 1
            return
        for _ in range(min(MAX_COPIES_PER_STEP, len(self._skipped))):
            node_id, _ = self._skipped.popitem(last=False)
            try:
                if self._cache.tree_core.is_backuped(node_id):
                    continue
                is_there = self._cache.back_up(node_id)
            except KeyError:
                continue
            if not is_there:
                self._skipped[node_id] = None
                self._next_pause = min(MAX_PAUSE_STEPS, max(1, 2 * self._next_pause))
                self._pause_steps = self._next_pause
                return
            self._next_pause = 0
            if storage is not None:
                storage.ledger.num_backups_recovered += 1

    # ---- Pins ----

    def release_pin(self) -> bool:
        """Unpin the waiting node that is worth least; False when none is pinned."""
        node_id = self._queue.unpin_one()
        if node_id is None:
            return False
        self._unlock(node_id)
        return True

    def _limit_pins(self) -> None:
        """Dirty nodes stay in what neither residents nor loads need."""
        limit = self._own_tokens * PIN_SHARE
        taken = self._queue.pinned_tokens + self._queue.flight_tokens
        if taken <= limit:
            return
        limit += max(0.0, self._own_tokens * LOADING_SHARE - self._cache.num_loading_tokens())
        while self._queue.pinned_tokens + self._queue.flight_tokens > limit and self.release_pin():
            pass

    def _unlock(self, node_id: int) -> None:
        lock = self._locks.pop(node_id, None)
        if lock is not None:
            self._cache.dec_host_lock_ref(node_id, lock)

    # ---- Life cycle ----

    def clear(self) -> None:
        """The tree was emptied, and its locks with it."""
        self._queue.clear()
        self._locks.clear()
        self._flying.clear()
        self._flying_nodes.clear()
        self._dirty.clear()
        self._dropped.clear()
        self._skipped.clear()

    def abandon(self) -> None:
        """The tier was detached, or memory is about to be emptied: nothing needs to stay."""
        for node_id in list(self._locks):
            self._unlock(node_id)
        self._queue.clear()
        self._flying.clear()
        self._flying_nodes.clear()
        self._dirty.clear()
        self._dropped.clear()
