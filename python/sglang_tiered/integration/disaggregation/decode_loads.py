"""Loads on the decode side of a handoff: decode promises prefill only what is in memory already.

Prefill sends only what follows the prefix that decode promised. SGLang counts what storage holds
into the promise and loads it afterwards. If less arrives (a damaged page, a load that no longer
pays) there is no other source, and the request fails. Having prefill compute the prompt again does
not help: SGLang does so without the request's adapter, grammar, images and log probabilities.

So here the load comes first. It begins when the request comes, beside the handshake with prefill,
and obeys the rules of every other load. The request is held back until its load has ended, and then
promised what device and host memory hold. The host copies are locked until they are on their way to
the device.

Hooks of ``DecodePreallocQueue`` and ``DecodeTransferQueue``, on the scheduler's thread. Every rank
runs them in the same order over the same requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.common import _req_radix_key
from sglang.srt.runtime_context import get_memory

from sglang_tiered.integration.cache.radix_cache import TieredRadixCache

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeRequest
    from sglang.srt.managers.schedule_batch import Req


_BEGUN = "_sglang_tiered_load_begun"
"""Marks a ``DecodeRequest`` whose load was asked for."""


def after_handshakes(_: Any, queue: Any, *__: Any, **___: Any) -> None:
    """Begin the loads of requests that wait for memory, and hold back those whose load runs."""
    cache = queue.tree_cache
    if not queue.scheduler.enable_decode_hicache or not _loads(cache):
        return
    waiting = [entry for entry in queue.queue if _may_load(entry)]
    for entry in waiting:
        if not hasattr(entry, _BEGUN):
            setattr(entry, _BEGUN, True)
            _begin(queue, entry.req)
    # What SGLang's other schedulers do for their waiting requests.
    memory = get_memory()
    for req, _end in cache.storage_prefetch_retries.pop_ready(
        [entry.req for entry in waiting],
        memory.hicache_storage_prefetch_retry_poll_interval,
        memory.hicache_storage_prefetch_retry_max_attempts,
    ):
        req.storage_prefetch_retry_attempts += 1
        cache.tiering.loads.comes(req, memory.hicache_storage_prefetch_retry_max_attempts)
        _begin(queue, req)
    for entry in waiting:
        handle = entry.req.cache_request_handle
        if not cache.load_has_ended(handle):
            entry.waiting_for_input = False  # until SGLang polls its handshake again
        elif entry.waiting_for_input:  # for memory of the device, in its turn
            cache.tiering.loads.keeps_room(handle)


def _loads(cache: Any) -> bool:
    return isinstance(cache, TieredRadixCache) and cache.tiering is not None


def _may_load(entry: DecodeRequest) -> bool:
    """Whether SGLang matches a prefix: not for a request that prefill computes once more."""
    return not entry.is_rebootstrap and entry.req.finished_reason is None


def _begin(queue: Any, req: Req) -> None:
    """Load what the tiers hold after the prefix in memory, matched as decode will match it."""
    cache, tokens = queue.tree_cache, req.origin_input_ids
    end = len(tokens)
    if queue._uses_swa_tail_prealloc():  # noqa: SLF001 - prefill always sends these windows
        end -= queue._swa_tail_len(end)  # noqa: SLF001
    key = _req_radix_key(cache, req, tokens, end)
    match = cache.match_prefix(MatchPrefixParams(key=key, cow_mamba=False, req=req))
    node = match.last_host_node
    if not (cache.is_backuped(node) or cache.is_root(node)):
        return
    start = match.device_prefix_len + match.host_hit_length
    passes_keys = cache.hicache_storage_pass_prefix_keys
    cache.prefetch_from_storage(
        req.cache_request_handle,
        node,
        tokens[start:end],
        cache.get_last_hash_value(node),
        cache.get_prefix_hash_values(node) if passes_keys else None,
        matched_prefix_tokens=tokens[:start],
        extra_key=req.extra_key,
        cache_salt=req.cache_salt,
    )


def after_match(_: Any, queue: Any, req: Req, prefix_match: Any) -> None:
    """Lock the prefix that a request matched: it was given memory, and the prefix will be
    promised."""
    if (
        prefix_match is not None
        and prefix_match.needs_local_restore
        and isinstance(queue.tree_cache, TieredRadixCache)
    ):
        queue.tree_cache.promised.lock(req.cache_request_handle, req.best_match_node)


def after_preallocation(result: Any, queue: Any, *_: Any, **__: Any) -> None:
    """Settle the loads of requests that left the queue, with a promise or a failure."""
    cache = queue.tree_cache
    if not _loads(cache):
        return
    promised, failed = result
    for entry in promised:
        handle = entry.req.cache_request_handle
        cache.storage_prefetch_retries.cancel(handle.rid)
        num_loaded, _start = cache.pop_prefetch_loaded_span(handle)
        cache.finish_storage_prefetch_admission(handle, num_loaded, reason=None)
    for entry in failed:
        cache.release_aborted_request(entry.req.cache_request_handle)


def after_transfers(_: Any, queue: Any, *__: Any, **___: Any) -> None:
    """Unlock host copies that are on their way to the device: the copy itself locks them."""
    cache = queue.tree_cache
    if isinstance(cache, TieredRadixCache) and cache.promised:
        waiting = {
            entry.req.cache_request_handle
            for entry in queue.queue
            if entry.hicache_restore_lock is None
        }
        cache.promised.unlock_all_but(waiting)
