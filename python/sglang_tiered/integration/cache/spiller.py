"""``Spiller``: a node's way from the device to NVMe. Its copy to host memory is SGLang's affair,
but where SGLang skips it; its store begins in the order that ``SpillQueue`` decides.

SGLang silently skips host copies while host memory is short. They are retried here, by what is the
same on all ranks. In a small host tier a copy of a device node may have been dropped, and is made
again before a load is put below it. A load may have to wait until stores leave it room.

SGLang asks for the store of a node once, when its copy to host memory is complete. Each store that
is queued pins its host pages until it is done. So a slow disk would fill host memory with pinned
pages, and what admission dropped would never be offered again. Here a node waits unqueued until its
turn, and what was dropped or failed is offered again while the disk is idle.

A waiting node is an id of SGLang's tree. Ids are never used twice; one that is gone raises
``KeyError``, which is how a node that was evicted meanwhile is noticed. A node that was split keeps
its id for the suffix, and the prefix gets a new one. So a node's turn is the turn of all nodes on
its path behind the point where it began. Nothing but ids, hashes and token counts is kept.

Several ranks must queue the same stores in the same order, and when a store finishes depends on the
local disk. A scheduler that does not decide alone therefore queues every store at once, as SGLang
does.

Everything runs on the scheduler thread, in bounded work per step, and waits for nothing.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV

from sglang_tiered.integration.cache.hiding_cache import HostLocks
from sglang_tiered.integration.cache.small_host import lacks_pages, store_again
from sglang_tiered.policy.admission import TouchMemory
from sglang_tiered.policy.spill import NodeStore, SpillQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import TreePathNodeInfo

    from sglang_tiered.integration.cache.hiding_cache import HidingCache
    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.policy.shares import HostBudget


STORES_S_PER_STEP = 5e-4
"""How long a step may take to begin stores, about 55 us each; one always is. A server of 100
requests a second makes about 200 nodes a second and as few as 20 steps."""

MAX_ANCESTORS = 4
"""Nodes above one whose turn it is that are stored with it, since it would be of no use alone."""

MAX_LOOKS_PER_STEP = 32
"""Nodes taken in a step, most of them gone when many are: about 1 us each."""

NUM_SAMPLED_PAGES = 16
"""Leading pages of a node that are looked up to see whether it was computed before."""
NUM_REMEMBERED_PAGES = 1 << 18

LOCKED_SHARE = 1 / 2
"""Of device memory: while running requests and stores lock more, several ranks begin no store that
locks any."""

RETRY_S, RETRY_GROWTH, MAX_RETRIES, MAX_REMEMBERED = 5.0, 4, 3, 4096

MAX_COPIES_PER_STEP = 4
"""Of the copies that were skipped."""

MAX_PAUSE_STEPS = 64


class Spiller:
    """Copies and stores the dirty nodes of one cache. Its ``SpillQueue`` says which stores are
    under way; its own tables hold locks, copies that were skipped, and nodes that were dropped and
    may be offered again.

    ``num_loading``: tokens that loads take."""

    def __init__(
        self,
        cache: HidingCache,
        budget: HostBudget,
        *,
        num_loading: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._budget = budget
        self._num_loading = num_loading
        self._clock = clock
        # The owner of what waits to be stored, and of what is being stored.
        self.queue = SpillQueue[int](budget.host_tokens, clock)
        self._locks: HostLocks[int] = HostLocks(cache)
        # By operation: what must stay on the device until it is stored.
        self._device_locks: dict[int, tuple[int, DecLockRefParams]] = {}
        self._dropped: OrderedDict[int, NodeStore[int]] = OrderedDict()
        self._touches = TouchMemory(NUM_REMEMBERED_PAGES)
        # A pin of another component's state could starve a pool whose eviction knows no pins.
        # In a small host tier what waits for its store keeps its copy anyway.
        self._may_pin = len(cache.tree_components) == 1 and not cache.has_small_host
        self._skipped: OrderedDict[int, None] = OrderedDict()  # nodes to copy later
        self._pause_steps = self._next_pause = 0
        self.num_skipped = self.num_recovered = 0
        # In a small host tier; None until counted, when something was copied or stored since.
        self._must_stay: int | None = None
        self._load_waits = False  # for these, since the last step: no skipped copy goes before it
        self._paths: dict[int, bool] = {}  # copies to make: True; tried in this step: False

    # ---- Copies ----

    def copy_attempted(self, node_id: int) -> None:
        """Remember a node that SGLang was to copy and did not."""
        cache = self._cache
        if cache.buffer_pipeline is None and not cache.tree_core.is_backuped(node_id):
            self._copy_later(node_id)
            self.num_skipped += 1

    def _copy_later(self, node_id: int) -> None:
        """Remember a node to copy later: host memory was too short for its copy."""
        self._skipped[node_id] = None
        if len(self._skipped) > MAX_REMEMBERED:
            self._skipped.popitem(last=False)

    def _back_up(self, node_id: int) -> bool:
        """Copy a node to host memory; return whether all of it is there now. Raises ``KeyError`` if
        the node is gone."""
        cache, core = self._cache, self._cache.tree_core
        if core.is_backuped(node_id):
            return True
        if cache.has_small_host:
            for part in core.parts_to_copy(node_id):
                if cache.begin_copy(BackupKV([part])) == 0 and part != node_id:
                    self._copy_later(part)
        else:
            cache.begin_copy(core.build_backup_kv_action(node_id))
        return bool(core.is_backuped(node_id))

    def has_host_path(self, node_id: int) -> bool | None:
        """Whether a load may be put below a node: SGLang drops it where the device alone holds what
        is above. In a small host tier, dropped copies are made again if there is room; None until
        the next step has tried. A copy locks its node on the device until it is done, and a batch
        that SGLang is just making up counts on evicting there."""
        cache, core = self._cache, self._cache.tree_core
        is_wanted = self._paths.pop(node_id, True)
        if not cache.has_small_host or core.has_copied_path(node_id):
            return True
        if is_wanted:
            self._paths[node_id] = True
            return None
        return False

    def begin_step(self) -> None:
        """Make the copies that loads wait for, and count anew what must stay."""
        self._must_stay = None
        wanted = [node_id for node_id, is_wanted in self._paths.items() if is_wanted]
        self._paths = dict.fromkeys(wanted, False)
        for node_id in wanted:
            with suppress(KeyError):  # the node is gone
                self.make_host_path(node_id)

    def make_host_path(self, node_id: int) -> bool:
        """Return ``has_host_path``, with the copies made now. Within a step alone."""
        cache, core = self._cache, self._cache.tree_core
        if not cache.has_small_host or core.has_copied_path(node_id):
            return True
        path = core.collect_path_info([node_id])[0]
        if path and path[-1].path_end > cache.cache_controller.mem_pool_host.logical_size:
            return False
        # What is copied first must not give way to what is copied next.
        lock = cache.inc_host_lock_ref(node_id).to_dec_params()
        try:
            return all(self._back_up(node.node_id) for node in path)
        finally:
            cache.dec_host_lock_ref(node_id, lock)

    def _is_being_copied(self, node_id: int) -> bool:
        """Whether host pages of a node are not filled yet. SGLang calls a node backed up once its
        copy is queued, and the copy also waits for the forward under way. The same on all ranks."""
        under_way = self._cache.ongoing_write_through.values()
        return any(node_id in pending.publish_node_ids for pending in under_way)

    def _retry_copies(self) -> None:
        """Try the skipped nodes until one fails, then pause, longer after each failure. Counts
        steps and stores, not seconds, so that all ranks try at the same time."""
        load_waits, self._load_waits = self._load_waits, False
        if not self._skipped or load_waits:
            return
        if self._pause_steps > 0:
            self._pause_steps -= 1
            return
        for _ in range(min(MAX_COPIES_PER_STEP, len(self._skipped))):
            node_id, _ = self._skipped.popitem(last=False)
            try:
                if self._cache.tree_core.is_backuped(node_id):
                    continue
                is_there = self._back_up(node_id)
            except KeyError:
                continue
            if not is_there:
                self._skipped[node_id] = None
                self._next_pause = min(MAX_PAUSE_STEPS, max(1, 2 * self._next_pause))
                self._pause_steps = self._next_pause
                return
            self._next_pause = 0
            self.num_recovered += 1

    # ---- Room, in a small host tier ----

    def stores_in_the_way(
        self, num_tokens: int, storage: TieredStorage, *, num_loading: int
    ) -> int:
        """Return the tokens whose stores a load of ``num_tokens`` waits for, since host memory has
        no room for it before, beside the ``num_loading`` of others; 0 if it may begin.

        A copy stays until it is stored, and in a small host tier such copies may be most of it. A
        load waits for room only where one rank decides alone, since ranks do not know of each other
        how long a store takes, and only while stores go on."""
        cache = self._cache
        if num_tokens == 0 or not cache.has_small_host or not cache.decides_alone:
            return 0
        if not storage.takes_stores:
            return 0
        must_stay = self._tokens_that_must_stay()
        host_tokens: int = cache.cache_controller.mem_pool_host.logical_size
        taken = must_stay + num_loading
        in_the_way = min(min(num_tokens, host_tokens) + taken - host_tokens, must_stay)
        self._load_waits |= in_the_way > 0
        return max(0, in_the_way)

    def _tokens_that_must_stay(self) -> int:
        """Count the tokens of copies that are being made, wait to be stored, or are being
        stored."""
        if self._must_stay is None:
            cache = self._cache
            making = [pending.publish_node_ids for pending in cache.ongoing_write_through.values()]
            nodes = {node_id for node_ids in making for node_id in node_ids}
            nodes.update(node_id for node_id, _ in cache.ongoing_backup.values())
            nodes.update(self.queue.waiting())
            self._must_stay = cache.tree_core.num_tokens(nodes)
        return self._must_stay

    def copy_begun(self) -> None:
        """Note that a copy was begun."""
        self._must_stay = None

    # ---- Stores that SGLang asks for ----

    def offer_node(self, node_id: int) -> None:
        """Store a node, whose host copy is complete, in its turn."""
        core = self._cache.tree_core
        path = core.collect_path_info([node_id])[0]
        node = path[-1]
        hashes = core.get_hash_values(node_id)
        if not self._cache.decides_alone or not hashes:
            if self._cache.is_erased(node_id):
                return
            self._queue_store(node_id, node.path_end)
            return
        for ancestor in path[:-1]:
            self.queue.promote_node(ancestor.node_id)
        sample = [bytes.fromhex(text) for text in hashes[:NUM_SAMPLED_PAGES]]
        returned = self._touches.num_seen(sample) > 0
        dropped = self._dropped.pop(node_id, None)
        store = NodeStore(node_id, node.path_start, node.path_end)
        if dropped is not None and self._cache.has_small_host:
            store.num_retries = dropped.num_retries  # copied again for this retry
        self._wait(store, returned=returned)

    def _wait(self, store: NodeStore[int], *, returned: bool) -> None:
        node_id = store.node
        evicted = self.queue.add_node(store, returned=returned)
        if evicted is not None:
            self._locks.unlock(evicted)
        if self._may_pin and node_id not in self._locks:
            self._locks.lock(node_id, node_id, store.num_tokens)
            self._limit_pins()

    def store_soon(self, path: Sequence[TreePathNodeInfo]) -> None:
        """Store these nodes soon: a checkpoint waits for them. Copies to host memory come first,
        and bring the store with them. The disk's index is asked only where no other rank must queue
        the same stores; queueing a store twice costs nothing."""
        core, storage = self._cache.tree_core, self._cache.storage
        if storage is None:
            return
        if self._cache.buffer_pipeline is not None:
            if lacks_pages(self._cache, path):
                store_again(self._cache, path[-1].node_id)
            return
        for node in path:
            node_id = node.node_id
            hashes = core.get_hash_values(node_id)
            # All of it: pages before the last one may have been erased, or reclaimed.
            if self._cache.decides_alone and 0 < len(hashes) == storage.num_kept(hashes):
                continue
            if not core.is_backuped(node_id):
                if not self._back_up(node_id):
                    self._copy_later(node_id)
            elif self._is_being_copied(node_id):
                continue
            elif self.queue.is_under_way(node_id):
                self.queue.promote_node(node_id)
            else:
                self.offer_node(node_id)

    def ended(self, results: Sequence[Any], waited_s: float) -> None:
        """Take the results of stores, of SGLang's operations, of the same ones on all ranks. The
        last that began had waited for ``waited_s``. What they read may be dropped now, so that
        skipped copies are retried at once in a small host tier."""
        self._must_stay = None
        if self._cache.has_small_host:
            self._pause_steps = self._next_pause = 0
        for result in results:
            if (lock := self._device_locks.pop(result.id, None)) is not None:
                self._cache.dec_lock_ref(*lock)
            store = self.queue.end_flight(result.id)
            if store is None or self.queue.is_under_way(store.node):
                continue  # the end of its next store says what is held
            if result.completed_tokens < len(result.host_indices):
                self._remember(store)
        self.queue.adapt_limit(waited_s)

    # ---- Every step ----

    def step(self, storage: TieredStorage | None) -> None:
        """Do the bounded work of one scheduler step."""
        self._retry_copies()
        if storage is None:
            return
        if self.queue:
            self._begin(storage)
        elif self._dropped and not self.queue.has_flights:
            self._offer_again(storage)

    def _begin(self, storage: TieredStorage) -> None:
        if not storage.takes_stores:
            return  # a sick disk: nothing is lost by waiting
        loads_wait = bool(self._cache.ongoing_prefetch)
        until = self._clock() + STORES_S_PER_STEP
        for _ in range(MAX_LOOKS_PER_STEP):
            store = self.queue.take_next_node(loads_wait=loads_wait)
            if store is None:
                break
            self._store(store, storage)
            if self._clock() >= until:
                break

    def _store(self, store: NodeStore[int], storage: TieredStorage) -> None:
        """Queue the stores of a node whose turn it is."""
        try:
            path = self._cache.tree_core.collect_path_info([store.node])[0]
        except KeyError:  # evicted, and counted when its pages were freed
            return
        chain_tokens = path[-1].path_end
        own = next(at for at, node in enumerate(path) if node.path_end > store.path_start)
        nodes = [*self._missing_ancestors(path[:own], chain_tokens, storage), *path[own:]]
        for node in nodes:
            self._hand_over(node, chain_tokens, store.num_retries)
        self._locks.unlock(store.node)  # now that the stores hold locks of their own

    def _missing_ancestors(
        self, path: tuple[TreePathNodeInfo, ...], chain_tokens: int, storage: TieredStorage
    ) -> list[TreePathNodeInfo]:
        """Return ancestors that NVMe does not hold (admission dropped them while the chain was
        short, or they were evicted): without them the tier could not serve what is below."""
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
            if node.node_id not in self.queue and gate.offer_again(
                hashes, prefix_tokens=chain_tokens
            ):
                missing.append(node)
            at += 1
        return missing

    def _hand_over(self, node: TreePathNodeInfo, chain_tokens: int, num_retries: int) -> None:
        node_id = node.node_id
        core = self._cache.tree_core
        if not core.is_backuped(node_id) or self._cache.is_erased(node_id):
            return
        self._dropped.pop(node_id, None)
        operation = self._queue_store(node_id, chain_tokens)
        if operation is not None:
            store = NodeStore(node_id, node.path_start, node.path_end, num_retries)
            self.queue.note_flight(operation, store)

    def _queue_store(self, node_id: int, chain_tokens: int) -> int | None:
        """Queue the store of a node, as part of a chain, now. Returns the operation, or None:
        SGLang declined it, or the node's host pages are still being copied, and the end of the copy
        brings the store."""
        cache, core = self._cache, self._cache.tree_core
        if self._is_being_copied(node_id):
            return None
        # The host copy cannot go while it is read, and the device must not evict a node whose
        # copy it could not keep: SGLang counts only what is locked there as unevictable.
        needs_device = (
            cache.has_small_host
            and not core.is_full_device_evicted(node_id)
            and not core.has_copied_path(node_id)
        )
        if needs_device and not cache.decides_alone and self._locks_too_much():
            return None
        operation: int | None = cache.begin_store(node_id, chain_tokens)
        if operation is not None and needs_device:
            self._device_locks[operation] = node_id, cache.inc_lock_ref(node_id).to_dec_params()
        return operation

    def _locks_too_much(self) -> bool:
        """Whether stores lock as much of device memory as they may; alike on all ranks. One that
        decides alone queues no more than the disk takes."""
        protected: int = self._cache.tree_core.full_protected_size()
        device_tokens: int = self._cache.token_to_kv_pool_allocator.size_full
        return bool(self._device_locks) and protected > device_tokens * LOCKED_SHARE

    # ---- What was dropped, and may be offered again ----

    def _remember(self, store: NodeStore[int]) -> None:
        if store.num_retries >= MAX_RETRIES:
            return
        store.since = self._clock() + RETRY_S * RETRY_GROWTH**store.num_retries
        store.num_retries += 1
        self._dropped[store.node] = store
        if len(self._dropped) > MAX_REMEMBERED:
            self._dropped.popitem(last=False)

    def _offer_again(self, storage: TieredStorage) -> None:
        """Offer one dropped node a step, while nothing else wants the disk."""
        node_id, store = next(iter(self._dropped.items()))
        if self._clock() < store.since:
            self._dropped.move_to_end(node_id)
            return
        if self._cache.ongoing_prefetch or not storage.gate.takes_everything:
            return
        if not storage.takes_stores:
            return
        del self._dropped[node_id]
        try:
            is_there = self._cache.tree_core.is_backuped(node_id)
            hashes = self._cache.tree_core.get_hash_values(node_id)
        except KeyError:
            return
        if storage.num_kept(hashes) == len(hashes):
            return
        if is_there:
            self._wait(store, returned=False)
        elif self._cache.has_small_host:  # the copy was dropped; the next one brings the offer
            self._remember(store)
            self._copy_later(node_id)

    # ---- Pins ----

    def release_pin(self) -> bool:
        """Unpin the node that waits longest, and may be evicted from now on; return False when no
        node is pinned."""
        return self._locks.unlock_oldest()

    def _limit_pins(self) -> None:
        """Unpin waiting nodes beyond what neither residents nor loads need."""
        limit = self._budget.pinned_tokens
        taken = self.queue.flight_tokens
        if self._locks.num_tokens + taken <= limit:
            return
        limit += self._budget.unused_by_loads(self._num_loading())
        while self._locks.num_tokens + taken > limit and self.release_pin():
            pass

    # ---- Life cycle ----

    def clear(self) -> None:
        """Drop all stores and locks: the tree was emptied."""
        self.queue.clear()
        self._locks.clear()
        self._device_locks.clear()
        self._dropped.clear()
        self._skipped.clear()
        self._paths.clear()
        self._must_stay = None

    def abandon(self) -> None:
        """Drop what waits, and forget what is under way: memory is about to be emptied."""
        self._locks.unlock_all_but()
        self.queue.clear()
        self._dropped.clear()

    def detached(self) -> None:
        """Unlock everything: nobody says how the stores end that were under way."""
        self.abandon()
        for lock in self._device_locks.values():
            self._cache.dec_lock_ref(*lock)
        self._device_locks.clear()
