"""``UnmarkedTreeCore``: SGLang's Rust tree core, whose nodes go by the hashes that the tiers know.

A request of a hidden tenant goes by a key with a mark (``HiddenTenants``), which separates its
nodes in the tree from those of before. Python's hashes leave the mark out (``around_seed``). The
Rust core hashes by itself, mark included, so what it answers is translated here. Nodes that were
loaded keep the hashes they came with, and so do those below.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    register_tree_core_backend,
    registered_tree_core_backends,
    select_tree_core_backend,
)
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sglang_tiered.integration.identity.tenants import is_marked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import StorageBackupSpec
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import InsertStepResult


BACKEND_NAME = "tiered"

MAX_NAMES = 1 << 20
"""Pages whose hash is translated. A page beyond is stored by a name that nobody asks for, and named
again at the next insertion below it."""


def use_unmarked_core(params: CacheInitParams) -> None:
    """Have a cache use this core where SGLang would use its Rust core."""
    if params.tree_core_backend is None and select_tree_core_backend(params) == "rust":
        if BACKEND_NAME not in registered_tree_core_backends():
            register_tree_core_backend(BACKEND_NAME, lambda params, _: UnmarkedTreeCore(params))
        params.tree_core_backend = BACKEND_NAME


class UnmarkedTreeCore(RustUnifiedTreeCore):  # type: ignore[misc]
    """See the module docstring. Owned by the cache, used on its thread."""

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
