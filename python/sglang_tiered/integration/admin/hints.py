"""Hints that a conversation is about to be used, in a scheduler process, for ``service``.

Every rank gets the same messages in the same order, so a hint begins on all of them in one step.
All load the same tokens: the least that any rank's tiers hold. What then becomes of it is
``Hints``' affair; a later question is answered from what that noted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

from sglang_tiered.integration.admin.conversations import (
    PendingRequests,
    names_prefix,
    refused,
    selector_of,
    without_store,
)
from sglang_tiered.integration.cache.ahead.chain_loader import chain_of
from sglang_tiered.integration.cache.ahead.hints import Hinted
from sglang_tiered.integration.ranks import least_on_every_rank

if TYPE_CHECKING:
    from sglang_tiered.integration.cache.ahead.chain_loader import Chain
    from sglang_tiered.integration.cache.ahead.hints import Hints
    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
    from sglang_tiered.integration.storage.backend import TieredStorage

__all__ = ["Prefetches"]

NOT_HERE = (
    "this server loads nothing ahead: it runs with pipeline parallelism, without tiers, or a "
    "hybrid model with little host memory"
)
NO_NAMESPACE = "the model's weights are still read, and until then no page is known; ask again"


class Prefetches:
    """The hints that are asked for in one scheduler process. Scheduler thread only."""

    def __init__(self) -> None:
        self._asked: PendingRequests[Hinted] = PendingRequests()

    def answer(self, cache: TieredRadixCache, number: str, body: dict[str, Any]) -> dict[str, Any]:
        """Begin to bring a conversation to host memory, or report how far that is."""
        storage, tiering = cache.storage, cache.tiering
        if storage is None:
            return without_store(cache)
        if tiering is None or cache.buffer_pipeline is not None:
            return refused(NOT_HERE)
        hints = tiering.hints
        if number not in self._asked:
            if not names_prefix(body):  # a later question, and it was dropped
                return refused("too many hints at once; ask again", 503)
            selector = selector_of(cache, body)
            if selector is None:
                return {"done": True, "unknown": True}
            tokens, extra_key, cache_salt = selector
            extra_key = cache.hidden_tenants.key_of(extra_key, cache_salt)
            found = _begin(cache, storage, hints, chain_of(cache, tokens, extra_key, cache_salt))
            if isinstance(found, str):
                return refused(found, 503)
            self._asked[number] = found
        hinted = self._asked[number]
        if hinted.why_dropped:
            hints.told(hinted)
            return refused(hinted.why_dropped, 503)
        return {
            "done": not hinted.is_active,
            "num_tokens": hinted.num_pages * int(cache.page_size),
            "num_in_memory": hinted.num_in_memory,
            "num_loading": hinted.num_loading,
        }


def _begin(
    cache: TieredRadixCache, storage: TieredStorage, hints: Hints, chain: Chain
) -> Hinted | str:
    """Return the hint for a chain, a new one unless there is one; or why there is none."""
    if not chain.hashes:
        return _nothing_to_load(chain, 0)
    earlier = hints.get(chain)
    if earlier is not None and (earlier.is_active or earlier.why_dropped):
        return earlier
    page_size = int(cache.page_size)
    end = len(chain.hashes) * page_size
    match = cache.match_prefix(MatchPrefixParams(key=chain.key_in(cache, end)))
    start = int(match.device_prefix_len + match.host_hit_length)
    spans = storage.lookup_spans(chain.hashes[start // page_size :])
    num_held = sum(span.num_pages for span in spans) * page_size
    knows, num_held = least_on_every_rank(cache, [int(storage.knows_namespace), num_held])
    if not knows:
        return NO_NAMESPACE
    if num_held < cache.prefetch_threshold:
        return _nothing_to_load(chain, start)
    return hints.begin(chain, start, start + num_held) or hints.why_no_room()


def _nothing_to_load(chain: Chain, num_in_memory: int) -> Hinted:
    hinted = Hinted(chain, num_in_memory, num_in_memory)
    hinted.release()
    return hinted
