"""``checkpoint_answers``: what a request has generated goes to its tiers while it still runs.

SGLang's tree, and with it the tiers, learns of an answer's KV when the request ends. A server that
dies before takes it along, and who goes on with the answer elsewhere computes all of it again. So
each running request gives its whole pages to the tree every so many tokens, as SGLang has chunks
of a long prompt do (``checkpoint_kv_cache``). Copies and stores follow as of any node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

if TYPE_CHECKING:
    from sglang_tiered.integration.cache.radix_cache import TieredRadixCache


MAX_IN_A_STEP = 4
"""Requests that began together are due together, and the next batch waits for each."""


def checkpoint_answers(
    cache: TieredRadixCache, batch: Any, every_tokens: int, *, may_free: bool
) -> None:
    """Give the tree what the requests of a batch have generated, where that is ``every_tokens`` or
    more than was given before. The result of the batch must have been processed. Scheduler thread
    only; every rank does it in the same step, as counts of tokens alone decide.

    The tree frees slots whose tokens it holds already, as of two equal answers. ``may_free``:
    whether that may be, while the next batch already reads them. It may where only later batches
    write into slots. On a decode instance a handoff writes beside them, so there such an answer is
    left to the one that came first.
    """
    if cache.supports_mamba():
        return  # the tree would fork the state of a running request
    num_done = 0
    for req in batch.reqs:
        # The KV of the last token is computed by the next batch.
        known = min(len(req.origin_input_ids) + len(req.output_ids) - 1, req.kv.kv_committed_len)
        up_to = known // cache.page_size * cache.page_size
        before = max(req.kv.cache_inserted_len, getattr(req, _LOOKED_AT, 0))
        if up_to - before < every_tokens or not _may_be_kept(req):
            continue
        if num_done == MAX_IN_A_STEP:
            return  # the others' turn is the next step
        num_done += 1
        setattr(req, _LOOKED_AT, up_to)
        req.refresh_fill_ids()
        if may_free or _is_alone(cache, req, up_to):
            cache.checkpoint(req, up_to=up_to)


_LOOKED_AT = "_sglang_tiered_looked_at"


def _is_alone(cache: TieredRadixCache, req: Any, up_to: int) -> bool:
    """Return whether the tree holds of these tokens only what it lent this request."""
    tokens = req.full_untruncated_fill_ids[:up_to]
    match = cache.match_prefix(
        MatchPrefixParams(key=RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt))
    )
    return bool(match.device_prefix_len <= req.kv.cache_protected_len)


def _may_be_kept(req: Any) -> bool:
    return (
        len(req.output_ids) > 0
        and not req.finished()
        and not req.is_retracted
        and req.kv.holds_kv
        and not req.skip_radix_cache_insert
        and req.session is None  # which keeps the row itself
        and req.beam_group is None
    )
