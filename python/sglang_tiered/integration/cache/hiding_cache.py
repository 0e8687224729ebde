"""``HidingCache``: SGLang's radix cache, with pages in it that were erased, and ``HostLocks``.

Every match ends before the first hidden page of its path, by a second walk of the tree where there
is one. Nothing is looked at while nothing is hidden; otherwise a node is looked through once after
each ``hide``.

``UnmarkedTreeCore`` is SGLang's Rust tree core, whose nodes go by the hashes that the tiers know. A
request of a hidden tenant goes by a key with a mark (``HiddenTenants``), which separates its nodes
in the tree from those of before. Python's hashes leave the mark out (``around_seed``). The Rust
core hashes by itself, mark included, so what it answers is translated here. Nodes that were loaded
keep the hashes they came with, and so do those below. Scheduler thread.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    register_tree_core_backend,
    registered_tree_core_backends,
    select_tree_core_backend,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.session.streaming_session import is_virtual_node

from sglang_tiered.integration.cache import small_host
from sglang_tiered.integration.identity.tenants import HiddenPages, HiddenTenants, is_marked

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from sglang.srt.mem_cache.base_prefix_cache import (
        CacheInitParams,
        CacheRequestHandle,
        DecLockRefParams,
        InsertParams,
        MatchResult,
    )
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer
    from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import StorageBackupSpec
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
        InsertStepResult,
        TreePathNodeInfo,
    )

    from sglang_tiered.integration.cache.loads import PrefetchArguments


Reason = TypeVar("Reason")

SEEN = "_sglang_tiered_hidden_version"
"""Marks a request with the version that it had seen when it was matched last."""

MAX_CLEAN = 65_536
"""Nodes remembered as holding no hidden page."""

BACKEND_NAME = "tiered"

MAX_NAMES = 1 << 20
"""Pages whose hash is translated. A page beyond is stored by a name that nobody asks for, and named
again at the next insertion below it."""


class HostLocks(Generic[Reason]):
    """Holds at most one lock for each reason, on the scheduler thread. A locked node keeps its
    ancestors, since only leaves are evicted."""

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self._cache = cache
        self._locks: dict[Reason, tuple[int, DecLockRefParams, int]] = {}
        self.num_tokens = 0  # of all locks, as told

    def __contains__(self, reason: Reason) -> bool:
        return reason in self._locks

    def __len__(self) -> int:
        return len(self._locks)

    def __iter__(self) -> Iterator[Reason]:
        """The reasons, oldest first."""
        return iter(list(self._locks))

    def lock(self, reason: Reason, node_id: int, num_tokens: int = 0) -> None:
        """Keep the host copies up to a node, instead of what the reason kept before."""
        params = self._cache.inc_host_lock_ref(node_id).to_dec_params()
        self.unlock(reason)
        self._locks[reason] = node_id, params, num_tokens
        self.num_tokens += num_tokens

    def unlock(self, reason: Reason) -> None:
        """Let go of what a reason kept. Unknown reasons are ignored."""
        if reason in self._locks:
            node_id, params, num_tokens = self._locks.pop(reason)
            self.num_tokens -= num_tokens
            self._cache.dec_host_lock_ref(node_id, params)

    def unlock_oldest(self) -> bool:
        """Let go of what has been kept for longest; return False if nothing is."""
        if not self._locks:
            return False
        self.unlock(next(iter(self._locks)))
        return True

    def unlock_all_but(self, kept: Container[Reason] = ()) -> None:
        for reason in self:
            if reason not in kept:
                self.unlock(reason)

    def clear(self) -> None:
        """Drop all locks: the tree was emptied."""
        self._locks.clear()
        self.num_tokens = 0


class HidingCache(UnifiedRadixCache):  # type: ignore[misc]
    """See the module docstring."""

    buffer_pipeline: Any = None  # SGLang's, where host memory is a buffer

    def __init__(self, params: CacheInitParams) -> None:
        self.hidden_pages = HiddenPages()
        self.hidden_tenants = HiddenTenants()
        self.promised: HostLocks[CacheRequestHandle] = HostLocks(self)  # see ``decode_loads``
        # Nodes with the span of their tokens, which a split changes, and the version that they
        # were looked through at.
        self._clean: dict[tuple[int, int, int], int] = {}
        super().__init__(params)

    # ---- Matches ----

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        req = params.req
        if self.hidden_pages and req is not None and not self._is_promised(req):
            setattr(req, SEEN, self.hidden_pages.version)
        return super().match_prefix(params)

    def match_visible(self, key: RadixKey) -> MatchResult:
        """Match a key in the tree itself: no session, no state for a request."""
        return self._match_visible(MatchPrefixParams(key=key))[1]

    def _match_tree(self, params: MatchPrefixParams) -> MatchResult:
        if not self.hidden_pages or (params.req is not None and self._is_promised(params.req)):
            return super()._match_tree(params)
        return self._finalize_match_result(*self._match_visible(params))

    def _is_promised(self, req: Any) -> bool:
        """Whether prefill sends only what follows the prefix that was promised for a request: what
        was erased since must serve this one still."""
        return bool(self.promised) and req.cache_request_handle in self.promised

    def _match_visible(self, params: MatchPrefixParams) -> tuple[MatchPrefixParams, MatchResult]:
        """Returns the match, and the part of the key that it is of."""
        result = self._walk(params)
        if not self.hidden_pages:
            return params, result
        last = result.last_visited_node_id
        node_id = result.best_match_node if last is None else last
        end = self._end_of_visible(params.key, node_id)
        if end is not None:
            params = replace(params, key=self._view(params.key)[:end])
            result = self._walk(params)
        return params, result

    def _walk(self, params: MatchPrefixParams) -> MatchResult:
        result = self.tree_core.match_prefix(params)
        self._apply_cache_actions(result.cache_actions)
        return result

    def _end_of_visible(self, key: RadixKey, node_id: int) -> int | None:
        """Return where the first hidden page on the path to a node begins, if there is one."""
        version = self.hidden_pages.version
        for node in self.tree_core.collect_path_info([node_id])[0]:
            if self._is_clean(node, version):
                continue
            hashes = self._hashes(node, key)
            num_visible = self.hidden_pages.num_visible(hashes)
            if num_visible < len(hashes):
                return int(node.path_start + num_visible * self.page_size)
            if len(self._clean) >= MAX_CLEAN:
                self._clean.clear()
            self._clean[_place(node)] = version
        return None

    def _is_clean(self, node: TreePathNodeInfo, version: int) -> bool:
        """Whether a node was looked through at this version, and holds no hidden page."""
        return self._clean.get(_place(node)) == version

    def _hashes(self, node: TreePathNodeInfo, key: RadixKey) -> Sequence[str]:
        """Return the hashes of a node's pages; ``key`` begins with the path to it. The tree has
        none of what was inserted while no storage was attached."""
        hashes: list[str] = self.tree_core.get_hash_values(node.node_id)
        if len(hashes) * self.page_size != node.path_end - node.path_start:
            path = self._view(key)[: node.path_end]
            whole: list[str] = get_storage_hash_str(path, None, page_size=self.page_size)
            hashes = whole[node.path_start // self.page_size :]
        return hashes

    def _view(self, key: RadixKey) -> RadixKey:
        """Return a key whose length counts as the tree counts."""
        view: RadixKey = key.maybe_to_bigram_view(self.tree_core.is_eagle)[0]
        return view

    def visible_part(self, call: PrefetchArguments) -> PrefetchArguments:
        """Return the load up to the first page that is hidden: nobody could use what follows."""
        if not self.hidden_pages:
            return call
        hashes = self.page_hashes(call.new_key, call.last_hash)
        num_visible = self.hidden_pages.num_visible(hashes)
        if num_visible == len(hashes):
            return call
        end = num_visible * self.page_size + int(self.tree_core.is_eagle)
        return call._replace(new_input_tokens=call.new_input_tokens[:end], storage_hit_end=None)

    def has_hidden(self, key: RadixKey) -> bool:
        """Whether a whole page of these tokens is hidden."""
        if not self.hidden_pages:
            return False
        hashes = self.page_hashes(key)
        return self.hidden_pages.num_visible(hashes) < len(hashes)

    def page_hashes(self, key: RadixKey, last_hash: str | None = None) -> list[str]:
        """Return the hashes of the whole pages of a key, which name them in every tier.
        ``last_hash``: of the page before them."""
        aligned = self._view(key).page_aligned(self.page_size)
        if len(aligned) == 0:
            return []
        hashes: list[str] = get_storage_hash_str(aligned, last_hash, page_size=self.page_size)
        return hashes

    def drop_loads(self, erased: Sequence[str] | None = None, *, all_of_them: bool = False) -> None:
        """Have requests compute what waits in host memory that is a buffer, and was erased."""
        release = super().release_aborted_request
        small_host.drop_loads(self, release, all_of_them=all_of_them, erased=erased)

    def get_last_hash_value(self, node_id: int) -> str | None:
        """Return None for the node that stands for a streaming session's own pages. Where host
        memory is a buffer, SGLang asks about that node without looking whether it is backed up."""
        if is_virtual_node(node_id):
            return None
        value: str | None = super().get_last_hash_value(node_id)
        return value

    # ---- What is kept of them ----

    def holds_hidden(self, node_id: int) -> bool:
        """Whether a page of a node is hidden."""
        if not self.hidden_pages:
            return False
        hashes = self.tree_core.get_hash_values(node_id)
        return self.hidden_pages.num_visible(hashes) < len(hashes)

    def _execute_and_commit_kv_backup(self, action: BackupKV, write_back: bool = False) -> int:
        # Where host memory is a buffer whole paths come, again and again; the gate refuses pages.
        is_buffer = self.buffer_pipeline is not None
        if not write_back and not is_buffer and any(map(self.holds_hidden, action.node_ids)):
            return 0
        written: int = super()._execute_and_commit_kv_backup(action, write_back)
        return written

    # ---- What was computed again ----

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        if self.hidden_pages and not is_virtual_node(req.last_node):
            self._note_computed(req)

    def _note_computed(self, req: Any) -> None:
        """Show the pages that a request has computed since they were erased, and hide what it
        has put behind others."""
        seen, is_behind, first = getattr(req, SEEN, 0), False, None
        key = RadixKey(req.full_untruncated_fill_ids, req.extra_key, cache_salt=req.cache_salt)
        version = self.hidden_pages.version
        path = self.tree_core.collect_path_info([req.last_node])[0]
        for at, node in enumerate(path):
            if not is_behind and self._is_clean(node, version):
                continue
            hashes = self._hashes(node, key)
            has_shown, is_behind = self.hidden_pages.computed(hashes, seen, is_behind=is_behind)
            if has_shown and first is None:
                first = at
        if is_behind:
            self._clean.clear()
        if first is not None:
            self.pages_shown(path[first:])

    def pages_shown(self, nodes: Sequence[TreePathNodeInfo]) -> None:
        """Called when pages of the first of these nodes were computed again: the tiers hold none of
        them, whatever the tree believes, and nodes below may lack a copy."""

    def reset(self) -> None:
        super().reset()
        self._clean.clear()
        self.hidden_pages.clear()
        self.promised.clear()


def _place(node: TreePathNodeInfo) -> tuple[int, int, int]:
    return node.node_id, node.path_start, node.path_end


def use_unmarked_core(params: CacheInitParams) -> None:
    """Have a cache use this core where SGLang would use its Rust core."""
    if params.tree_core_backend is None and select_tree_core_backend(params) == "rust":
        if BACKEND_NAME not in registered_tree_core_backends():
            register_tree_core_backend(BACKEND_NAME, lambda params, _: UnmarkedTreeCore(params))
        params.tree_core_backend = BACKEND_NAME


class UnmarkedTreeCore(RustUnifiedTreeCore):  # type: ignore[misc]
    """See the module docstring."""

    max_names = MAX_NAMES

    def __init__(self, params: CacheInitParams) -> None:
        # By the core's own hash, the longest known first. A dict would walk over what was deleted.
        self._names: OrderedDict[str, str] = OrderedDict()
        self._inserted: RadixKey | None = None  # by the insertion under way, if it is marked
        super().__init__(params)

    def begin_insert(self, params: InsertParams) -> InsertStepResult:
        self._inserted = params.key if is_marked(params.key.extra_key) else None
        return self._name_inserted(super().begin_insert(params))

    def resume_insert(self) -> InsertStepResult:
        return self._name_inserted(super().resume_insert())

    def _name_inserted(self, step: InsertStepResult) -> InsertStepResult:
        key = self._inserted
        if key is not None and step.result is not None:
            self._inserted = None
            if step.result.last_device_node is not None:
                self._name_path(step.result.last_device_node, key)
        return step

    def _name_path(self, node_id: int, key: RadixKey) -> None:
        """Name the pages on the path to a node, from the last one on that has a name."""
        names, own = self._names, self._binding
        path = self.collect_path_info([node_id])[0]
        start = len(path)
        while start and own.get_last_hash_value(path[start - 1].node_id) not in names:
            start -= 1
        prior = names[own.get_last_hash_value(path[start - 1].node_id)] if start else None
        view = key.maybe_to_bigram_view(self.is_eagle)[0]
        for node in path[start:]:
            part = view[node.path_start : node.path_end]
            hashes = get_storage_hash_str(part, prior, page_size=self.page_size)
            # The core has none of what was inserted while no storage was attached.
            names.update(zip(own.get_hash_values(node.node_id), hashes, strict=False))
            prior = hashes[-1]
        while len(names) > self.max_names:
            names.popitem(last=False)

    def reset(self) -> None:
        super().reset()
        self._names.clear()

    # ---- Answers ----

    def get_last_hash_value(self, node_id: int) -> str | None:
        value: str | None = super().get_last_hash_value(node_id)
        return value if value is None else self._names.get(value, value)

    def get_prefix_hash_values(self, node_id: int) -> list[str]:
        return self._translated(super().get_prefix_hash_values(node_id))

    def get_hash_values(self, node_id: int) -> list[str]:
        return self._translated(super().get_hash_values(node_id))

    def build_storage_backup_spec(
        self, node_id: int, pass_prefix_keys: bool
    ) -> StorageBackupSpec | None:
        spec = super().build_storage_backup_spec(node_id, pass_prefix_keys)
        if spec is None or not self._names:
            return spec
        for transfers in spec.comp_xfers.values():
            self._translate_keys(transfers)
        prefix = spec.prefix_keys
        return spec._replace(
            hash_value=self._translated(spec.hash_value),
            prefix_keys=None if prefix is None else self._translated(prefix),
        )

    def build_hicache_transfers(self, *args: Any, **kwargs: Any) -> list[PoolTransfer] | None:
        transfers: list[PoolTransfer] | None = super().build_hicache_transfers(*args, **kwargs)
        self._translate_keys(transfers or ())
        return transfers

    def _translate_keys(self, transfers: Iterable[PoolTransfer]) -> None:
        for transfer in transfers if self._names else ():
            if transfer.keys is not None:
                transfer.keys = self._translated(transfer.keys)

    def _translated(self, hashes: list[str]) -> list[str]:
        names = self._names
        return [names.get(each, each) for each in hashes] if names else hashes
