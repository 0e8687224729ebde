"""What the tree, and with it the tiers, gets of requests that SGLang would keep to themselves.

``checkpoint_answers``: SGLang's tree learns of an answer's KV when the request ends. A server that
dies before takes it along, and who goes on with the answer elsewhere computes all of it again. So
each running request gives its whole pages to the tree every so many tokens, as SGLang has chunks
of a long prompt do (``checkpoint_kv_cache``). Copies and stores follow as of any node.

``PublishingSession``: SGLang keeps a streaming session's KV in the session's own record from turn
to turn and puts only the first prompt into the tree. Here each finished turn is inserted too, by
the way that SGLang has for the first prompt. The session's lock moves to the node that the
insertion ended on, and from then on the tree owns those pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.session.streaming_session import StreamingSession

from sglang_tiered.integration.cache.hiding_cache import SEEN

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult
    from sglang.srt.session.streaming_session import SessionSlot

    from sglang_tiered.integration.cache.hiding_cache import HidingCache


MAX_IN_A_STEP = 4
"""Requests that began together are due together, and the next batch waits for each."""

_LOOKED_AT = "_sglang_tiered_looked_at"


def checkpoint_answers(
    cache: HidingCache, batch: Any, every_tokens: int, *, may_free: bool
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


def _is_alone(cache: HidingCache, req: Any, up_to: int) -> bool:
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


class PublishingSession(StreamingSession):  # type: ignore[misc]
    """Owned by the cache, used on the scheduler thread only.

    Window and Mamba states of a session stay as SGLang has them: a finished turn would hand its
    state to the tree, and the next turn needs it.
    """

    def take(self, req: Req) -> None:
        super().take(req)
        slot = self.borrowed_slot(req)
        if slot is not None and not hasattr(slot, "turns_key"):
            slot.turns_key = _key(req)
            slot.computed_by = {(req.extra_key, req.cache_salt)}
            slot.seen_version = getattr(req, SEEN, 0)

    def try_match_prefix(self, params: MatchPrefixParams) -> MatchResult | None:
        slot = self.find_active_slot(params.req)
        if slot is not None:
            prefix_len = min(slot.kv.kv_committed_len, len(params.key))
            if prefix_len < slot.kv.cache_protected_len:
                # The tree owns the last token of a prompt without an answer, and this turn has no
                # input either: it would compute that token again in the tree's page. SGLang ends
                # the scheduler here, but drops the record on an NPU, as is done here.
                self.release_session(params.req.session.session_id)
            elif self._is_hidden(slot) or self._has_hidden(slot, params.key[:prefix_len]):
                # The turn computes all of it again, on a record of its own.
                self.release_session(params.req.session.session_id)
                if params.req.kv is slot.kv:
                    params.req.detach_kv()
        matched: MatchResult | None = super().try_match_prefix(params)
        return matched

    def _is_hidden(self, slot: SessionSlot) -> bool:
        """Whether a turn of a record was of before its tenant was erased, or all was hidden."""
        return any(self.cache.hidden_tenants.is_hidden(*key) for key in slot.computed_by)

    def _has_hidden(self, slot: SessionSlot, key: RadixKey) -> bool:
        """Whether a record holds pages that were erased since its first turn began or since this
        was asked last: those of before were computed again."""
        version = self.cache.hidden_pages.version
        if slot.seen_version == version:
            return False
        slot.seen_version = version
        return bool(self.cache.has_hidden(key))

    def try_cache_finished_req(self, req: Req) -> bool:
        slot = self.borrowed_slot(req)
        if slot is not None:
            slot.computed_by.add((req.extra_key, req.cache_salt))
            # A record is one chain of pages. After a turn that goes by another key, or by none, its
            # pages are not what any one key stands for: another adapter may have computed some of
            # them, and the tree must not own a page twice.
            if slot.turns_key != _key(req):
                slot.turns_key = None
            is_plain = tuple(self.cache.tree_components) == (ComponentType.FULL,)
            if isinstance(req.finished_reason, FINISH_ABORT):
                if slot.turns_key is None:
                    # SGLang drops the record, and would insert all of it by this turn's key.
                    req.skip_radix_cache_insert = True
            elif req.finished() and slot.turns_key is not None and is_plain:
                self._publish(req, slot)  # unless it was retracted, and goes on with the record
        computed_len = req.kv.kv_committed_len
        kept = bool(super().try_cache_finished_req(req))
        if kept and slot is not None and slot.kv.kv_committed_len > computed_len:
            # With speculative decoding SGLang counts the last token too, for a verify step that was
            # on its way. There may have been none, and its slot, reserved ahead, would never be
            # written; so the next turn computes that token. Mamba states cannot go back by one:
            # they stay as SGLang has them, and the tree gets no more of the record.
            if ComponentType.MAMBA in self.cache.tree_components:
                slot.turns_key = None
            else:
                slot.kv.kv_committed_len = computed_len
        return kept

    def _publish(self, req: Req, slot: SessionSlot) -> None:
        # The next turn may bring no tokens. It computes the last one again, whose KV is there if
        # the next step was on its way when this turn ended, and it must not go back behind what the
        # tree owns.
        num_tokens = len(req.origin_input_ids) + len(req.output_ids_through_stop)
        up_to = min(req.owned_kv_len(), num_tokens - 1)
        req.refresh_fill_ids()  # which lag behind the output
        if up_to <= req.kv.cache_protected_len:
            # Nothing new: the tree has all of it, by the first prompt or an earlier turn. Of a
            # prompt without an answer it may own the last token too (``try_match_prefix``).
            self.cache.note_request(req, req.owned_kv_len())
            return
        req.lock, slot.lock = slot.lock, None
        self.cache.checkpoint_into_tree(req, up_to=up_to)
        self._lock_to_slot(req, slot)


def _key(req: Req) -> tuple[Any, Any] | None:
    """Return what identifies a request's pages beside its tokens; None if tokens do not determine
    its KV."""
    return None if req.skip_radix_cache_insert else (req.extra_key, req.cache_salt)
