"""SGLang's ``buffer_only`` host memory, for hybrid models whose host tier device memory outgrows.

Under write-through such a tier holds copies of what the device holds and no more, so nothing new
reaches NVMe. ``SmallHostTreeCore`` has them give way, but knows full attention alone. Here host
memory holds what is on its way: a node is copied as it is inserted, stored, and its copy freed.
What is loaded goes to the device when its request is admitted (``BufferModePipeline``). So nothing
comes back from host memory itself, and nothing can be loaded ahead.

SGLang remembers what it believes the storage to hold, and writes none of it again. What the tiers
erase must be forgotten here. Scheduler thread; ranks come to the same in the same step.
"""

from __future__ import annotations

from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.runtime_context import get_context, get_disagg, get_parallel

from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.cache.loads import restorable_ends
from sglang_tiered.integration.storage.controller import NextStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import TreePathNodeInfo

__all__ = [
    "checked_size",
    "describe_store",
    "drop_loads",
    "is_storing",
    "lacks_pages",
    "loads_on_the_way",
    "note_absent",
    "reason_against",
    "store_again",
    "stores_under_way",
    "use",
]


def reason_against() -> str | None:
    """Return why host memory cannot be a buffer in this process."""
    disagg = get_disagg()
    reasons = {
        "decode promises prefill what host memory holds": disagg.disaggregation_mode == "decode",
        "the server may switch its role": bool(disagg.enable_pd_role_switch),
        "contexts are split over ranks": get_parallel().attn_dcp_size > 1,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def use(params: CacheInitParams) -> None:
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


def stores_under_way(cache: Any) -> dict[int, int]:
    """Return the nodes that are being stored, by the operation."""
    if cache.buffer_pipeline is None:
        return {operation: node_id for operation, (node_id, _) in cache.ongoing_backup.items()}
    entries = cache.buffer_pipeline.ongoing_backup
    return {operation: entry.intent.snapshot.node_id for operation, entry in entries.items()}


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
    return ends is not None and ends[-1:] != [len(hashes)]


def store_again(cache: Any, node_id: int) -> None:
    """Have SGLang store all pools of a path on the device, whatever it believes. Raises
    ``KeyError`` if the node is gone."""
    for node in cache.tree_core.collect_path_info([node_id])[0]:
        note_absent(cache, cache.tree_core.get_hash_values(node.node_id), 0)
    cache.request_buffer_backup(node_id)
