"""``HostCopies``: copies of nodes in host memory, and the loads that wait for room.

Retries host copies that SGLang silently skips while host memory is short. In a small host tier a
copy of a device node may have been dropped, and is made again before a load is put below it. There
a load may also have to wait until stores leave it room.

Retries of skipped copies depend on host memory and on whose store ended, which are the same on all
ranks, and run everywhere. Everything runs on the scheduler thread and waits for nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sglang_tiered.integration.cache.hiding_cache import HidingCache
    from sglang_tiered.integration.storage.backend import TieredStorage


MAX_COPIES_PER_STEP = 4
"""Of the copies that were skipped."""

MAX_REMEMBERED = 4096
MAX_PAUSE_STEPS = 64


class HostCopies:
    """The host copies of one cache. ``waiting_stores``: nodes that wait for their store."""

    def __init__(self, cache: HidingCache, *, waiting_stores: Callable[[], Iterable[int]]) -> None:
        self._cache = cache
        self._waiting_stores = waiting_stores
        self._skipped: OrderedDict[int, None] = OrderedDict()
        self._pause_steps = self._next_pause = 0
        self.num_skipped = self.num_recovered = 0
        # In a small host tier; None until counted, when something was copied or stored since.
        self._must_stay: int | None = None
        self._load_waits = False  # for these, since the last step: no skipped copy goes before it
        self._paths: dict[int, bool] = {}  # copies to make: True; tried in this step: False

    # ---- Copies ----

    def attempted(self, node_id: int) -> None:
        """Remember a node that SGLang was to copy and did not."""
        cache = self._cache
        if cache.buffer_pipeline is None and not cache.tree_core.is_backuped(node_id):
            self.remember(node_id)
            self.num_skipped += 1

    def remember(self, node_id: int) -> None:
        """Remember a node to copy later: host memory was too short for its copy."""
        self._skipped[node_id] = None
        if len(self._skipped) > MAX_REMEMBERED:
            self._skipped.popitem(last=False)

    def back_up(self, node_id: int) -> bool:
        """Copy a node to host memory; return whether all of it is there now. Raises ``KeyError`` if
        the node is gone."""
        cache, core = self._cache, self._cache.tree_core
        if core.is_backuped(node_id):
            return True
        if cache.has_small_host:
            for part in core.parts_to_copy(node_id):
                if cache.begin_copy(BackupKV([part])) == 0 and part != node_id:
                    self.remember(part)
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
            return all(self.back_up(node.node_id) for node in path)
        finally:
            cache.dec_host_lock_ref(node_id, lock)

    def is_being_copied(self, node_id: int) -> bool:
        """Whether host pages of a node are not filled yet. SGLang calls a node backed up once its
        copy is queued, and the copy also waits for the forward under way. The same on all ranks."""
        under_way = self._cache.ongoing_write_through.values()
        return any(node_id in pending.publish_node_ids for pending in under_way)

    def retry(self) -> None:
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
                is_there = self.back_up(node_id)
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
            nodes.update(self._waiting_stores())
            self._must_stay = cache.tree_core.num_tokens(nodes)
        return self._must_stay

    def copied(self) -> None:
        """Note that a copy was begun."""
        self._must_stay = None

    def stores_ended(self) -> None:
        """Retry skipped copies at once in a small host tier. SGLang has taken the results of
        stores, of the same ones on all ranks, and what they read may be dropped now."""
        self._must_stay = None
        if self._cache.has_small_host:
            self._pause_steps = self._next_pause = 0

    def clear(self) -> None:
        """Drop all nodes: the tree was emptied."""
        self._skipped.clear()
        self._paths.clear()
        self._must_stay = None
