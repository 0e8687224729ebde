"""``SmallHostTreeCore``: SGLang's tree core for a host tier that device memory outgrows.

Under write-through a node on the device keeps its copy in host memory until the device gives it up,
and a copy needs those of all its ancestors. So a host tier that is not larger than device memory
soon holds nothing but copies of what the device holds. Then no new node gets a copy, none reaches
NVMe, and nothing that NVMe holds finds room to be loaded. Here, as in SGLang's write-back mode, a
node on the device may lack a copy that nodes below it have. Copies of what the device holds are the
first to go. Unlike there, copies are made when nodes are inserted, and no eviction waits for one.
What NVMe holds already is not copied again.

One rule keeps every node evictable: where a node is in host memory only, its ancestors have copies.

SGLang's Rust core decides by itself which copies go, so this is the Python one; for models whose
only component is full attention, whose host values are the only ones.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import InsertResult
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

from sglang_tiered.integration.compat import check_signatures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

__all__ = ["BACKEND_NAME", "SmallHostTreeCore", "register"]

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


def register() -> None:
    """Make the core known to SGLang in this process. Idempotent."""
    if BACKEND_NAME not in registered_tree_core_backends():
        check_signatures(_SIGNATURES)
        register_tree_core_backend(BACKEND_NAME, SmallHostTreeCore)


class SmallHostTreeCore(UnifiedTreeCore):  # type: ignore[misc]
    """See the module docstring. The cache sets the attributes below once the host tier is there;
    they must answer the same on all ranks."""

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
        if node.backuped:
            self._release_full_host_duplicate(node, {BASE_COMPONENT_TYPE: 0}, **frees)
        elif not self._has_left_a_copy(node):
            result.unbacked_tokens = len(node.key)
        if node.children:  # in host memory only, since a lock kept them there
            dropped = self.drop_subtree_no_host(node_id)
            for name in _FREES:
                into, given = getattr(result, name), getattr(dropped, name)
                into.extend(given) if isinstance(into, list) else into.update(given)
                given.clear()
            return result
        self._delete_unbacked_device_leaf(node, result.tracker, **frees)
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
