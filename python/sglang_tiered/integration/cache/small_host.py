"""Models whose host tier device memory outgrows: ``SmallHostTreeCore`` for full attention, SGLang's
``buffer_only`` host memory for hybrid ones.

Under write-through a node on the device keeps its copy in host memory until the device gives it up,
and a copy needs those of all its ancestors. So such a tier soon holds nothing but copies of what
the device holds. Then no new node gets a copy, none reaches NVMe, and nothing that NVMe holds finds
room to be loaded.

Of a hybrid model host memory holds what is on its way: a node is copied as it is inserted, stored,
and its copy freed. What is loaded goes to the device when its request is admitted
(``BufferModePipeline``). So nothing comes back from host memory itself, and nothing can be loaded
ahead.

SGLang remembers what it believes the storage to hold, and writes none of it again. What the tiers
erase must be forgotten here. Scheduler thread; ranks come to the same in the same step.
"""

from __future__ import annotations

from array import array
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import InsertResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    register_tree_core_backend,
    registered_tree_core_backends,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    DriveHostEvictionResult,
    EvictDeviceLeafResult,
)
from sglang.srt.runtime_context import get_context, get_disagg, get_parallel

from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.cache.loads import restorable_ends
from sglang_tiered.integration.compat import check_signatures
from sglang_tiered.integration.storage.controller import NextStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import TreePathNodeInfo


BACKEND_NAME = "tiered_small_host"

MAX_LOOKS = 64
"""Copies that an eviction looks at from either end, in the order they were made: about 2.5 us
each."""

COPY_SHARE = 1 / 4
"""The share of the host tier that one node's copy may take: a longer node is copied in parts."""

_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore"
_FREES = ("tracker", "device_frees", "host_frees", "cache_actions")
_SIGNATURES = {
    f"{_CORE}._inc_hit_count_and_check": ("self", "node"),
    f"{_CORE}._should_backup_after_insert": ("self", "state"),
    f"{_CORE}._build_backup_kv_action": ("self", "node", "write_back"),
    f"{_CORE}._split_node": ("self", "key", "child", "split_len"),
    f"{_CORE}._can_reclaim_full_host_duplicate": ("self", "node"),
    f"{_CORE}._release_full_host_duplicate": ("self", "node", *_FREES),
    f"{_CORE}._delete_unbacked_device_leaf": ("self", "node", *_FREES),
    f"{_CORE}.drop_subtree_no_host": ("self", "node_id"),
    f"{_CORE}.evict_device_leaf": ("self", "node_id", "is_write_back"),
    f"{_CORE}.drive_host_eviction": ("self",),
    "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface:DriveHostEvictionResult": (
        *_FREES,
    ),
    f"{_CORE}.insert_host": ("self", "node_id", "key", "host_value", "hash_value"),
}


def register_core() -> None:
    """Make the core known to SGLang in this process. Idempotent."""
    if BACKEND_NAME not in registered_tree_core_backends():
        check_signatures(_SIGNATURES)
        register_tree_core_backend(BACKEND_NAME, SmallHostTreeCore)


class SmallHostTreeCore(UnifiedTreeCore):  # type: ignore[misc]
    """As in SGLang's write-back mode, a node on the device may lack a copy that nodes below it
    have. Copies of what the device holds are the first to go. Unlike there, copies are made when
    nodes are inserted, and no eviction waits for one. What NVMe holds already is not copied again.

    One rule keeps every node evictable: where a node is in host memory only, its ancestors have
    copies.

    SGLang's Rust core decides by itself which copies go, so this is the Python one; for models
    whose only component is full attention, whose host values are the only ones. The cache sets the
    attributes below once the host tier is there; they must answer the same on all ranks.
    """

    max_copy_tokens: int = 1 << 62
    may_give_up: Callable[[int], bool] = staticmethod(lambda _: True)
    """Whether nothing is going to read a node's host copy."""
    is_stored: Callable[[Sequence[str]], bool] | None = None
    """Whether NVMe holds all pages of a node, whose copy was dropped. None where ranks may
    differ in that: then NVMe is assumed to hold it, and it is stored again now and then."""

    @property
    def is_write_back(self) -> bool:
        """The rules of the tree are those of write-back; the cache's policy is write-through."""
        return True

    @is_write_back.setter
    def is_write_back(self, _: bool) -> None:
        pass

    # ---- Copies to host memory ----

    def _inc_hit_count_and_check(self, node: UnifiedTreeNode) -> bool:
        if node.evicted:
            return False
        node.hit_count += 1
        return bool(
            self.enable_hicache
            and not node.backuped
            and not self._has_left_a_copy(node)
            and node.hit_count >= self.write_through_threshold
        )

    def _should_backup_after_insert(self, state: Any) -> bool:
        node = state.target_node
        if not state.is_new_leaf:
            return False
        leaf_end = state.total_prefix_length + len(node.key)
        return leaf_end > state.params.inserted_len and self._inc_hit_count_and_check(node)

    def _build_backup_kv_action(self, node: UnifiedTreeNode, write_back: bool = False) -> BackupKV:
        return BackupKV([node.id])

    def parts_to_copy(self, node_id: int) -> list[int]:
        """Split a node that is longer than one copy may be; return the nodes it became, in order.
        Must not be called while an insertion walks the tree."""
        node = self.node_by_id(node_id)
        size = self.max_copy_tokens // self.page_size * self.page_size
        parts = []
        while len(node.key) > size and node.write_through_pending_id is None:
            part, action = self._split_node(node.key, node, size)
            assert action is None, "a split without a copy under way calls for no action"
            parts.append(part.id)
        return [*parts, node_id]

    def _has_left_a_copy(self, node: UnifiedTreeNode) -> bool:
        """Whether a node without a host copy is on NVMe, as far as is known."""
        if not _was_given_up(node) or not node.hash_value:
            return False
        if self.is_stored is None:
            return bool(node.hit_count & (node.hit_count - 1))  # a store may have been refused
        return self.is_stored(node.hash_value)

    def has_copied_path(self, node_id: int) -> bool:
        """Whether a node and all above it are in host memory."""
        return self._has_copied_path(self.node_by_id(node_id))

    def _has_copied_path(self, node: UnifiedTreeNode) -> bool:
        while node is not self.root_node:
            if not node.backuped:
                return False
            node = node.parent
        return True

    def num_tokens(self, node_ids: Iterable[int]) -> int:
        """Return the length of nodes together; those that are gone count as 0."""
        num_tokens = 0
        for node_id in node_ids:
            with suppress(KeyError):
                num_tokens += len(self.node_by_id(node_id).key)
        return num_tokens

    # ---- Copies that go ----

    def drive_host_eviction(
        self, component_type: ComponentType, num_tokens: int
    ) -> DriveHostEvictionResult:
        result = DriveHostEvictionResult()
        component = self.components_by_type.get(component_type)
        if component is None:
            return result
        if component_type == BASE_COMPONENT_TYPE:
            self._give_up_copies(num_tokens, result)
        frees = {name: getattr(result, name) for name in _FREES[1:]}
        component.drive_host_eviction(num_tokens, result.tracker, **frees)
        return result

    def _give_up_copies(self, num_tokens: int, result: DriveHostEvictionResult) -> None:
        """Drop copies, the latest first: the device evicts next what it has held for longest, whose
        copy is then the only one. Goes from the leaves up, so that a copy keeps those above it.
        Looks at a bounded number: where stores wait for long, thousands of copies must stay."""
        latest = islice(reversed(self.full_host_duplicates.values()), MAX_LOOKS)
        oldest = islice(self.full_host_duplicates.values(), MAX_LOOKS)
        for candidate in (*latest, *oldest):
            node = candidate
            if node.evicted or not node.backuped:
                self.full_host_duplicates.pop(node.id, None)
            while result.tracker[BASE_COMPONENT_TYPE] < num_tokens and self._may_give_up(node):
                frees = {name: getattr(result, name) for name in _FREES[1:]}
                self._release_full_host_duplicate(node, result.tracker, **frees)
                node.copy_given_up = True
                del self.full_host_duplicates[node.id]
                node = node.parent  # the next one up may have been kept by this one alone

    def _may_give_up(self, node: UnifiedTreeNode) -> bool:
        return bool(
            node.id in self.full_host_duplicates
            and self._can_reclaim_full_host_duplicate(node)
            and not any(child.backuped for child in node.children.values())
            and self.may_give_up(node.id)
        )

    def _split_node(
        self, key: RadixKey, child: UnifiedTreeNode, split_len: int
    ) -> tuple[UnifiedTreeNode, Any]:
        made: tuple[UnifiedTreeNode, Any] = super()._split_node(key, child, split_len)
        made[0].copy_given_up = _was_given_up(child)
        return made

    # ---- Device memory ----

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> EvictDeviceLeafResult:
        """Keep the host copy if all nodes above have one, else drop both: below a node without a
        copy nothing could be found in host memory. Nothing is copied here."""
        node = self.node_by_id(node_id)
        locked = any(data.host_lock_ref > 0 for data in node.component_data)
        if node.backuped and (locked or self._has_copied_path(node)):
            kept: EvictDeviceLeafResult = super().evict_device_leaf(node_id, False)
            return kept
        result = EvictDeviceLeafResult()
        frees = {name: getattr(result, name) for name in _FREES[1:]}
        is_lost = not (node.backuped or self._has_left_a_copy(node))
        if node.backuped:
            self._release_full_host_duplicate(node, {BASE_COMPONENT_TYPE: 0}, **frees)
        if node.children:  # in host memory only, since a lock kept them there
            dropped = self.drop_subtree_no_host(node_id)  # or not, where one below is locked
            is_lost = is_lost and dropped.is_dropped
            for name in _FREES:
                into, given = getattr(result, name), getattr(dropped, name)
                into.extend(given) if isinstance(into, list) else into.update(given)
                given.clear()
        else:
            self._delete_unbacked_device_leaf(node, result.tracker, **frees)
        result.unbacked_tokens = len(node.key) * is_lost
        return result

    # ---- Loads from storage ----

    def insert_host(
        self, node_id: int, key: RadixKey, host_value: Any, hash_value: list[str]
    ) -> InsertResult:
        """Drop a load whose place is now below a node without a copy, as SGLang's own write-through
        does."""
        node, rest = self.node_by_id(node_id), key
        while len(rest) > 0:
            child = node.children.get(rest.child_key(self.page_size))
            if child is None:
                break
            node = child
            matched = child.key.match(rest, page_size=self.page_size)
            rest = rest[matched:]
            if matched < len(child.key):
                break
        if len(rest) > 0 and not self._has_copied_path(node):
            return InsertResult(prefix_len=0, total_len=len(key), host_insert_dropped=True)
        inserted: InsertResult = super().insert_host(node_id, key, host_value, hash_value)
        return inserted


def _was_given_up(node: UnifiedTreeNode) -> bool:
    """Whether a node's copy was made, offered to NVMe, and dropped."""
    return getattr(node, "copy_given_up", False)


def reason_against_buffer() -> str | None:
    """Return why host memory cannot be a buffer in this process."""
    disagg = get_disagg()
    reasons = {
        "decode promises prefill what host memory holds": disagg.disaggregation_mode == "decode",
        "the server may switch its role": bool(disagg.enable_pd_role_switch),
        "contexts are split over ranks": get_parallel().attn_dcp_size > 1,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def use_buffer(params: CacheInitParams) -> None:
    """Have SGLang build the cache so. Its Rust core names pages of hidden tenants as it inserts
    them, before ``UnmarkedTreeCore`` can translate the names: so this takes the Python core."""
    get_context().override("sglang_tiered.host_buffer", hicache_host_memory_mode="buffer_only")
    params.tree_core_backend = "python"


@contextmanager
def checked_size() -> Iterator[None]:
    """Say in one sentence that host memory is too small for a buffer."""
    try:
        yield
    except ValueError as error:
        if "buffer_only requires a host arena" not in str(error):
            raise
        raise ConfigError(
            "the host tier is too small for two windows of this model; raise --tier-host-bytes, "
            "or pass --tier-mode off."
        ) from error


def describe_store(cache: Any, ack_id: int) -> None:
    """Tell the controller of the node whose copy has arrived, and whose store SGLang queues next:
    none of its pages is stored if it was erased."""
    node_id = cache.buffer_pipeline.ongoing_write_through[ack_id].intent.snapshot.node_id
    path = cache.tree_core.collect_path_info([node_id])[0]
    cache.cache_controller.next_store = NextStore(
        cache.tenant_of(node_id), path[-1].path_end if path else 0, cache.is_erased(node_id)
    )


def nodes_of_stores(cache: Any, operations: Iterable[Any]) -> list[int]:
    """Return the nodes that these store, but for what SGLang has dropped."""
    buffer = cache.buffer_pipeline
    ongoing = cache.ongoing_backup if buffer is None else buffer.ongoing_backup
    entries = [ongoing[each.id] for each in operations if each.id in ongoing]
    return [each[0] if buffer is None else each.intent.snapshot.node_id for each in entries]


def loads_on_the_way(cache: Any) -> list[CacheRequestHandle]:
    """Return the requests for which something is loaded, or waits in the buffer."""
    staged = () if cache.buffer_pipeline is None else cache.buffer_pipeline.staged_prefetches
    return [*staged, *cache.ongoing_prefetch]


def drop_loads(
    cache: Any,
    release: Callable[[CacheRequestHandle], None],
    *,
    all_of_them: bool,
    erased: Sequence[str] | None,
) -> None:
    """Have requests compute what was erased and is in the buffer, or on its way there; with
    ``all_of_them`` whatever is. Believe the storage to hold none of the pages ``erased``, or none
    at all. ``release``: SGLang's, of a request that was aborted."""
    buffer = cache.buffer_pipeline
    if buffer is None:
        return
    for request in loads_on_the_way(cache):
        if all_of_them or _is_hidden(cache, request):
            release(request)
            if cache.tiering is not None:
                cache.tiering.loads.revoked(request)
    parked = [each for each in buffer.pending_hit_allocs if each.handle in cache.ongoing_prefetch]
    buffer.pending_hit_allocs.clear()
    buffer.pending_hit_allocs.extend(parked)
    if erased is None:
        cache.storage_existence_cache.clear()
    else:
        note_absent(cache, erased, 0)


def _is_hidden(cache: Any, request: CacheRequestHandle) -> bool:
    """Whether the prefix of a load holds what was erased. By its tokens: what a rank has found of
    it by now is another on each."""
    buffer, info = cache.buffer_pipeline, cache.ongoing_prefetch.get(request)
    if info is None:
        key = buffer.staged_prefetches[request]
        tokens = key.key_tokens
    else:
        key = info.prefetch_key
        tokens = buffer.prefetch_prefix_key(request).token_ids + array("q", key.token_ids)
    if cache.hidden_tenants and cache.hidden_tenants.is_hidden(key.extra_key, key.cache_salt):
        return True
    return bool(
        cache.has_hidden(RadixKey(tokens, extra_key=key.extra_key, cache_salt=key.cache_salt))
    )


def note_absent(cache: Any, hashes: Sequence[str], num_held: int) -> None:
    """Have SGLang store the pages behind the first ``num_held`` again once they are computed: the
    tiers lack them, or the states at their ends. SGLang finds that out by a question that is not
    asked where the tiers hold too little. All ranks call it with the same."""
    if cache.buffer_pipeline is not None:
        for beliefs in cache.storage_existence_cache._pools.values():  # noqa: SLF001
            beliefs.invalidate_beyond(hashes, num_held)


def is_storing(cache: Any, path: Sequence[TreePathNodeInfo]) -> bool:
    """Whether a pool of one of these nodes is not stored yet: SGLang stores KV, and then windows
    and states. The same on all ranks."""
    buffer = cache.buffer_pipeline
    return buffer is not None and any(map(buffer.backup_pending, (each.node_id for each in path)))


def lacks_pages(cache: Any, path: Sequence[TreePathNodeInfo]) -> bool:
    """Whether the tiers lack a page of these nodes, or a state at their end. Where several ranks
    must do the same, they are taken to."""
    storage = cache.storage
    if not cache.decides_alone or storage is None or not path:
        return bool(path)
    hashes = [each for node in path for each in cache.tree_core.get_hash_values(node.node_id)]
    if storage.num_kept(hashes) < len(hashes):
        return True
    ends = restorable_ends(cache, path[0].parent_id, hashes, storage)
    return ends is not None and ends[-1:] != [len(hashes) * cache.page_size]


def store_again(cache: Any, node_id: int) -> None:
    """Have SGLang store all pools of a path on the device, whatever it believes. Raises
    ``KeyError`` if the node is gone."""
    for node in cache.tree_core.collect_path_info([node_id])[0]:
        note_absent(cache, cache.tree_core.get_hash_values(node.node_id), 0)
    cache.request_buffer_backup(node_id)
