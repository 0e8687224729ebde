"""Hints that a conversation is about to be used, in a scheduler process, for ``service``.

A hint begins on all ranks in one step, and all load the same tokens: the least that any rank's
tiers hold. What then becomes of it is ``Hints``' affair; a later question is answered from what
that noted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

from sglang_tiered.api import CallError
from sglang_tiered.integration.admin.calls import NO_NAMESPACE, UNKNOWN, store_of
from sglang_tiered.integration.admin.conversations import selector_of
from sglang_tiered.integration.cache.ahead.chain_loader import chain_of
from sglang_tiered.integration.cache.ahead.hints import Hinted

if TYPE_CHECKING:
    from sglang_tiered.integration.admin.calls import Steps
    from sglang_tiered.integration.cache.ahead.chain_loader import Chain
    from sglang_tiered.integration.cache.ahead.hints import Hints
    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.storage.backend import TieredStorage

__all__ = ["prefetch"]

NOT_HERE = (
    "this server loads nothing ahead: it runs with pipeline parallelism, without tiers, or a "
    "hybrid model with little host memory"
)


def prefetch(cache: TieredRadixCache, _: str, body: dict[str, Any]) -> Steps:
    """Bring a conversation to host memory."""
    storage, tiering = store_of(cache), cache.tiering
    if tiering is None or cache.buffer_pipeline is not None:
        raise CallError(NOT_HERE)
    hints, selector = tiering.hints, (yield from selector_of(cache, body))
    if selector is None:
        return UNKNOWN
    tokens, extra_key, cache_salt = selector
    extra_key = cache.hidden_tenants.key_of(extra_key, cache_salt)
    chain = chain_of(cache, tokens, extra_key, cache_salt)
    hinted: Hinted = yield from _begin(cache, storage, hints, chain)
    while True:  # hints are alike on all ranks
        store_of(cache)
        if hinted.why_dropped:
            hints.told(hinted)
            raise CallError(hinted.why_dropped, 503)
        answer = {
            "done": not hinted.is_active,
            "num_tokens": hinted.num_pages * int(cache.page_size),
            "num_in_memory": hinted.num_in_memory,
            "num_loading": hinted.num_loading,
        }
        if answer["done"]:
            return answer
        yield answer


def _begin(cache: TieredRadixCache, storage: TieredStorage, hints: Hints, chain: Chain) -> Steps:
    """Return the hint for a chain, a new one unless there is one. Raises ``CallError``."""
    if not chain.hashes:
        return Hinted(chain, 0, 0)
    earlier = hints.get(chain)
    if earlier is not None and (earlier.is_active or earlier.why_dropped):
        return earlier
    page_size = int(cache.page_size)
    end = len(chain.hashes) * page_size
    match = cache.match_prefix(MatchPrefixParams(key=chain.key_in(cache, end)))
    start = int(match.device_prefix_len + match.host_hit_length)
    spans = storage.lookup_spans(chain.hashes[start // page_size :])
    num_held = sum(span.num_pages for span in spans) * page_size
    knows, num_held = yield [int(storage.knows_namespace), num_held]
    if not knows:
        raise CallError(NO_NAMESPACE, 503)
    if num_held < cache.prefetch_threshold:
        return Hinted(chain, start, start)
    hinted = hints.begin(chain, start, start + num_held)
    if hinted is None:
        raise CallError(hints.why_no_room(), 503)
    return hinted
