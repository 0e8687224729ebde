"""``Returns``: requests whose front is computed while the back of their prefix loads.

The front is SGLang's: an ordinary request with chunks. The back loads as several of SGLang's
storage operations, each under a handle of its own, read from the last to the first. Until the tree
holds what comes before it, a segment that has arrived stays with its operation, which owns its host
pages and counts them. At a chunk boundary what has arrived is hung into the tree, and the request
yields. It gives its row back, which loses nothing, since the tree has just taken its progress. Then
it goes to the head of the waiting queue, where SGLang matches the device's front and the host's
back. The functions at the end are hooks into SGLang's admission.

Scheduler thread only. Several ranks come to the same decisions. What has arrived is the same on all
of them, since SGLang takes note of it in the same step. What a rank's own prices and clock say is
reduced where it decides, at chunk boundaries and while such a request waits.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import split_cached_prefix_by_tier
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_tiered.integration.cache.hiding_cache import HostLocks
from sglang_tiered.integration.cache.loads import Back, Segment, State, allocate_now
from sglang_tiered.integration.ranks import least_on_every_rank
from sglang_tiered.policy.both_ends import (
    BackLeft,
    computes_next,
    end_of_chunk,
    parts_of,
    segment_bounds,
    spans_between,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.integration.cache.load_planner import LoadPlanner
    from sglang_tiered.integration.cache.loads import PrefetchArguments
    from sglang_tiered.integration.observe.stories import Stories
    from sglang_tiered.storage.base import Span


HANDLE_PREFIX = "both-ends/"
ATTEMPT = -1
"""Of the handles of segments: those of requests, whose names are their clients', count from 0."""
FAR = 1 << 40
"""In place of where a chunk ends: nowhere."""

MAX_PASSED = 8
"""Requests that others may pass in one pass, since a chunk of theirs would be the second one."""

_NUM_PASSED = "_sglang_tiered_num_passed"  # of SGLang's adder, which is one of a pass

logger = logging.getLogger(__name__)


def _has_place(scheduler: Any) -> bool:
    """Whether a request that gives its row back gets one again, whoever comes before it."""
    num_waiting = len(scheduler.waiting_queue)
    return bool(
        scheduler.req_to_token_pool.available_size() >= num_waiting
        and len(scheduler.running_batch.reqs) + num_waiting < scheduler.max_running_requests
    )


class Returns:
    """See the module docstring."""

    def __init__(
        self,
        cache: Any,  # ``TieredRadixCache``, which imports this
        planner: LoadPlanner[CacheRequestHandle],
        notes: Stories,
    ) -> None:
        self._cache = cache
        self._notes = notes
        self._planner = planner
        self._loads = planner.loads
        self._locks: HostLocks[CacheRequestHandle] = HostLocks(cache)
        self._inserting: CacheRequestHandle | None = None
        self._numbers = itertools.count()
        self._is_on: bool | None = None  # None until the scheduler was looked at

    def back_of(self, request: CacheRequestHandle) -> Back | None:
        """Return what loads from the back of a request's prefix, if anything does."""
        return self._loads.get(request).back

    def _all(self) -> list[Back]:
        found = map(self.back_of, self._loads.in_state(State.BOTH_ENDS))
        return [record for record in found if record is not None]

    def _segment(self, handle: CacheRequestHandle) -> tuple[Back, Segment] | None:
        """Return a segment that is not in the tree yet, and whose it is."""
        if handle.rid.startswith(HANDLE_PREFIX):
            for record in self._all():
                for segment in record.segments:
                    if segment.handle == handle:
                        return record, segment
        return None

    # ---- It begins ----

    def comes(self, scheduler: Any, req: Any) -> None:
        """Allow the request whose load is planned next to be computed in chunks of ours."""
        if self._is_on is None:
            self._is_on = _is_on(scheduler)
        # An operator may change the threshold of a running server. From 2 on, what was computed
        # once gets no host copy, below which a back could hang.
        has_copies = self._cache.write_through_threshold <= 1
        record = self._loads.of(req.cache_request_handle)
        record.may_yield = self._is_on and has_copies and _may_yield(req)
        record.has_run = req.already_computed > 0

    def pays(self, call: PrefetchArguments, num_held: int, ends: Sequence[int] | None) -> bool:
        """Whether to read the ``num_held`` tokens that the tiers hold from their back, as far as
        this rank knows. Where a load may end at some places only (``ends``) it cannot be cut."""
        if ends is not None or not self._loads.get(call.request).may_yield:
            return False
        if self._planner.follows:  # the rank with the tiers has the prices
            return bool(segment_bounds(call.num_before, num_held, self._cache.page_size))
        return self._planner.plan_segments(call.request, num_ahead=self.num_ahead()) is not None

    def num_ahead(self) -> int:
        """Return the tokens of loads under way. SGLang counts those too that have arrived and wait
        for their front."""
        occupied: int = self._cache.cache_controller.prefetch_tokens_occupied
        arrived = sum(
            segment.end - segment.start
            for record in self._all()
            for segment in record.segments
            if segment.has_ended
        )
        return max(0, occupied - arrived)

    def num_loaded(self, call: PrefetchArguments, num_held: int) -> int:
        """Return how many of so many tokens are loaded; the first ones are computed in any case."""
        bounds = segment_bounds(call.num_before, num_held, self._cache.page_size)
        return bounds[-1] - bounds[0] if bounds else 0

    def begin(
        self, call: PrefetchArguments, hashes: Sequence[str], spans: Sequence[Span], *, is_new: bool
    ) -> None:
        """Begin to load these pages of a request in segments, the last one first. ``is_new``: it
        has just come, so this is between two steps."""
        cache, page_size, base = self._cache, self._cache.page_size, call.num_before
        bounds = segment_bounds(base, len(hashes) * page_size, page_size)
        held, num_tiers = self._planner.tokens_of(spans), len(self._planner.costs.transfers)
        segments: list[Segment] = []
        handles: list[CacheRequestHandle] = []
        ahead = self._planner.tokens_ahead(self.num_ahead())
        for start, end in reversed(list(zip(bounds, bounds[1:], strict=False))):
            handle = CacheRequestHandle(
                f"{HANDLE_PREFIX}{call.request.rid}/{next(self._numbers)}", ATTEMPT
            )
            handles.append(handle)
            self._notes.has_part(call.request, handle)
            pages = hashes[(start - base) // page_size : (end - base) // page_size]
            cache.begin_load(
                call._replace(
                    request=handle,
                    new_input_tokens=call.new_input_tokens[start - base : end - base],
                    last_hash=hashes[(start - base) // page_size - 1],
                    prefix_keys=None,
                    matched_prefix_tokens=range(start),  # SGLang takes its length alone
                    storage_hit_end=None,
                ),
                pages,
            )
            if handle not in cache.ongoing_prefetch:
                cache.storage_prefetch_retries.cancel(handle.rid)
                break
            parts = parts_of(spans_between(held, start - base, end - base), num_tiers)
            segments.insert(0, Segment(handle, start, end, parts))
        if not segments:
            self._planner.back_ended(call.request, 0)
            return
        totals = [sum(parts) for parts in zip(*(each.parts for each in segments), strict=True)]
        expected_s = self._planner.costs.load_seconds(totals, ahead)
        self._loads.get(call.request).back = Back(
            call.request, segments, time.monotonic(), expected_s, segments[-1].end, handles
        )
        self._loads.move(call.request, State.BOTH_ENDS)
        self._notes.begun(call.request)
        self._planner.begins(call.request)
        self._planner.num_both_ends += 1
        if is_new and cache.decides_alone:
            allocate_now(cache)

    # ---- Segments arrive ----

    def arrived(self, operation: Any) -> bool:
        """Note that a load has ended. Returns whether it is a segment that waits for its front."""
        found = self._segment(operation.handle)
        if found is None or operation.handle == self._inserting:
            return False
        _, segment = found
        segment.has_ended, segment.num_arrived = True, operation.completed_tokens
        return True

    def revoked(self, handle: CacheRequestHandle) -> None:
        """Note that a segment was given up."""
        if (found := self._segment(handle)) is not None:
            record, segment = found
            record.segments.remove(segment)

    def step(self) -> None:
        """Hang what has arrived for requests that wait again into the tree."""
        for record in self._all():
            if record.reach is not None:
                record.reach = self._insert_arrived(record, record.reach)

    def _insert_arrived(self, record: Back, reach: int) -> int:
        """Hang the segments that have arrived below the first ``reach`` tokens, which the tree
        holds. Returns how far it holds the prompt now."""
        cache, parent = self._cache, None
        while record.segments:
            segment = record.segments[0]
            if segment.end <= reach:
                self._drop(record, segment)
                continue
            if segment.start > reach or not segment.has_ended:
                break
            if parent is None:
                parent = self._node_at(record, segment.start)
            if (
                segment.num_arrived == 0
                or parent is None
                or not self._insert(record, segment, parent)
            ):
                self._drop(record, segment)
                break
            record.segments.remove(segment)
            cache.storage_prefetch_retries.cancel(segment.handle.rid)
            self._move_loaded(segment.handle, record.request)
            end = segment.start + segment.num_arrived
            parent = self._node_at(record, end)
            if parent is None:
                break
            self._locks.lock(record.request, parent)
            reach = max(reach, end)
            if end < segment.end:
                break
        return reach

    def _insert(self, record: Back, segment: Segment, parent: int) -> bool:
        """Hang a segment below the node at which it begins; False if it is of another tenant."""
        cache = self._cache
        info = cache.ongoing_prefetch[segment.handle]
        own, req = info.prefetch_key, record.req
        if (own.extra_key, own.cache_salt) != (req.extra_key, req.cache_salt):
            return False  # erased meanwhile
        if info.operation.storage_start != segment.start:
            return False  # of another place
        lock = cache.inc_host_lock_ref(parent).to_dec_params()
        cache.dec_host_lock_ref(info.anchor_node_id, info.anchor_lock_params)
        cache.ongoing_prefetch[segment.handle] = info._replace(
            anchor_node_id=parent, anchor_lock_params=lock
        )
        self._inserting = segment.handle
        try:
            cache._handle_prefetch_result(info.operation)  # noqa: SLF001
        finally:
            self._inserting = None
        return True

    def _move_loaded(self, handle: CacheRequestHandle, request: CacheRequestHandle) -> None:
        """Let SGLang settle a segment's tokens as its request is admitted, with those of others
        that were hung in since it ran last."""
        cache = self._cache
        hits = cache._storage_prefetch_hit_remaining_by_reqid  # noqa: SLF001
        if handle in hits:
            hits[request] = hits.get(request, 0) + hits.pop(handle)
        num_loaded, start = cache.pop_prefetch_loaded_span(handle)
        if num_loaded:
            loaded = cache.prefetch_loaded_tokens_by_reqid
            loaded[request] = loaded.get(request, 0) + num_loaded
            cache.prefetch_loaded_storage_start_by_reqid.setdefault(request, start or 0)

    def _node_at(self, record: Back, num_tokens: int) -> int | None:
        """Return the node at which so many tokens of the prompt end, if it is in host memory."""
        req = record.req
        tokens = req.full_untruncated_fill_ids[:num_tokens]
        key = RadixKey(tokens, extra_key=req.extra_key, cache_salt=req.cache_salt)
        match = self._cache.match_prefix(MatchPrefixParams(key=key))
        if match.device_prefix_len + match.host_hit_length < num_tokens:
            return None
        node: int = match.best_match_node
        core = self._cache.tree_core
        return node if core.is_root(node) or core.is_backuped(node) else None

    def _drop(self, record: Back, segment: Segment) -> None:
        record.segments.remove(segment)
        self._cache.release_aborted_request(segment.handle)

    # ---- The front ----

    def may_start(self, request: CacheRequestHandle) -> bool:
        """Whether a request may be admitted now: it can compute, or what it waits for is there."""
        record = self.back_of(request)
        if record is None or record.reach is None:
            return True
        first = record.segments[0] if record.segments else None
        if first is None or first.start > record.reach or first.has_ended:
            return True
        return self._computes_next(record, record.reach, self._planner.num_others())

    def end_of_chunk(self, req: Any, start: int) -> int | None:
        """Return where a chunk of a request that begins at ``start`` ends at the latest."""
        record = self.back_of(req.cache_request_handle)
        if record is None:
            return None
        record.req = req
        end = None
        if not self._planner.follows:
            end = end_of_chunk(self._planner.costs, self._left(record), start)
        least = self._least(FAR if end is None else end)
        return None if least == FAR else least

    def _least(self, value: int) -> int:
        """Return the smallest value of all ranks, which make this call in the same place."""
        alone = self._cache.decides_alone
        return value if alone else least_on_every_rank(self._cache, [value])[0]

    def chunk_ended(self, scheduler: Any, req: Any) -> None:
        """Go on, or yield: what comes next has arrived, or is sooner loaded than computed. Called
        when the tree has taken over what a chunk computed."""
        record = self.back_of(req.cache_request_handle)
        if record is None:
            return
        begin = req.kv.cache_protected_len
        meets = bool(record.segments) and record.segments[0].start <= begin
        front = self._node_at(record, record.segments[0].start) if meets else None
        if not record.segments or (meets and front is None):
            # Nothing comes, or it would hang below what has no host copy.
            self.drop(record.request)
            return
        record.reach = self._insert_arrived(record, begin)
        if record.reach > begin:
            self._yield(scheduler, record)
        elif not record.segments:
            self.drop(record.request)
        elif (
            front is not None
            and record.segments[0].start <= begin
            and _has_place(scheduler)
            and not self._computes_next(
                record,
                begin,
                max(0, self._planner.num_others() - 1),  # of those that ran it is one itself
            )
        ):
            self._locks.lock(record.request, front)
            self._yield(scheduler, record)
        else:
            record.reach = None

    def admitted(self, req: Any, *, is_chunked: bool) -> None:
        """Note that a part of a request runs, the last one if it is not ``is_chunked``."""
        record = self.back_of(req.cache_request_handle)
        if record is None:
            return
        if is_chunked:
            record.reach = None
        else:
            self.drop(record.request)

    def _yield(self, scheduler: Any, record: Back) -> None:
        req, cache = record.req, self._cache
        req.storage_prefetch_last_match_len = req.kv.cache_protected_len
        req.storage_hit_length, req.storage_hit_start = 0, None  # of the part that has run
        release_kv_cache(req, cache, checkpoint=False)
        scheduler.chunked_req = None
        scheduler.waiting_queue.insert(0, req)

    def _left(self, record: Back) -> BackLeft:
        infos = self._cache.ongoing_prefetch
        return BackLeft(
            [segment.start for segment in record.segments],
            record.end,
            [segment.left(infos.get(segment.handle)) for segment in record.segments],
        )

    def _computes_next(self, record: Back, start: int, num_others: int) -> bool:
        """Whether to compute what comes next, as any rank would that has the prices."""
        storage = self._cache.storage
        is_served = storage is not None and storage.serves_loads
        own = not self._planner.follows and (
            not is_served
            or computes_next(
                self._planner.costs,
                self._left(record),
                start,
                num_others=num_others,
                late_s=time.monotonic() - record.begun_at - record.expected_s,
            )
        )
        return not self._least(int(not own))

    # ---- It ends ----

    def drop(self, request: CacheRequestHandle) -> None:
        """Drop what is still to come for a request, or one of its segments. Unknown ones are
        ignored."""
        self.revoked(request)
        record = self.back_of(request)
        if record is not None:
            self._loads.get(request).back = None
            self._loads.move(request, State.WAITING)
            num_given_up = sum(each.end - each.start for each in record.segments)
            if num_given_up:
                self._notes.given_up(request, "late", num_given_up)
            self._planner.back_ended(request, num_given_up)
            for segment in list(record.segments):
                self._drop(record, segment)
            for handle in record.handles:  # SGLang waits for a chance to try again
                self._cache.storage_prefetch_retries.cancel(handle.rid)
            self._locks.unlock(request)

    def drop_all(self) -> None:
        """Drop what is still to come for every request: nobody may use it any more."""
        for record in self._all():
            self.drop(record.request)

    def clear(self) -> None:
        """Drop the locks: the tree was emptied. What loads was dropped with the records."""
        self._locks.clear()


# ---- Hooks ----


def drop_segment_lines(record: logging.LogRecord) -> bool:
    """Filter SGLang's line on every load that ends, where it is a part of one."""
    return record.levelno > logging.INFO or f"req={HANDLE_PREFIX}" not in record.getMessage()


def _returns_of(cache: Any) -> Returns | None:
    tiering = getattr(cache, "tiering", None)
    return None if tiering is None else tiering.returns


def _reason_against(scheduler: Any) -> str | None:
    """Return what a server does with which a request cannot yield between its chunks."""
    cache = scheduler.tree_cache
    reasons = {
        "prefill and decode are apart": scheduler.disaggregation_mode
        is not DisaggregationMode.NULL,
        "prefill is not chunked": scheduler.chunked_prefill_size is None,
        "it speculates": not scheduler.spec_algorithm.is_none(),
        "the model's states lie at some places only": len(cache.tree_components) > 1,
        "the host tier is smaller than device memory": cache.has_small_host,
        "host memory is written back": cache.is_write_back,
        "chunks are aligned": scheduler.truncation_align_size is not None,
        "requests may preempt others": scheduler.enable_priority_preemption,
        "requests may wait for so long only": envs.SGLANG_REQ_WAITING_TIMEOUT.get() > 0,
        "it is a diffusion model": scheduler.dllm_config is not None,
        "the model makes embeddings": not scheduler.is_generation,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def _is_on(scheduler: Any) -> bool:
    """Whether the operator wants prefixes to be computed from both ends, and the server can."""
    config = scheduler.tree_cache.config
    if config is None or config.nvme is None or not config.nvme.both_ends:
        return False
    reason = _reason_against(scheduler)
    if reason is not None:
        logger.info("Nothing is loaded from its back while its front is computed: %s.", reason)
    return reason is None


def _may_yield(req: Any) -> bool:
    """Whether what a request has computed is in the tree after each chunk, and nowhere else. And
    whether nothing is wanted of it that only one prefill without a gap gives."""
    return not (
        req.skip_radix_cache_insert
        or (req.return_logprob and req.logprob_start_len >= 0)
        or req.return_hidden_states
        or req.return_routed_experts
        or req.return_indexer_topk
        or req.session is not None
        or req.beam_group is not None
        or req.input_embeds is not None
        or req.token_indices_to_pool is not None
        or req.retracted_stain
    )


def _drop_hits(adder: Any, req: Any, prefix_len: int) -> None:
    """Take what a request had before it yielded from a batch's hits by tier, nearest first."""
    hits = split_cached_prefix_by_tier(
        prefix_len=prefix_len,
        host_hit_len=req.materialized_host_hit_len(),
        storage_hit_len=req.storage_hit_length,
        storage_hit_start=req.storage_hit_start,
        host_hit_is_storage=req.host_hit_is_storage,
    )
    num_left = req.already_computed
    for tier, num_tokens in zip(("device", "host", "storage"), hits, strict=True):
        num_taken = min(num_left, num_tokens)
        num_left -= num_taken
        name = f"log_{tier}_hit_tokens"
        setattr(adder, name, getattr(adder, name) - num_taken)


def around_select(original: Callable[..., Any], adder: Any, req: Any, **named: Any) -> Any:
    """Have a chunk of a front end where it is expected to meet its back."""
    verdict = original(adder, req, **named)
    returns = _returns_of(adder.tree_cache)
    if returns is None or isinstance(verdict, AddReqResult):
        return verdict
    # Of what it computed before it yielded, a part may be gone, and its record with it.
    req.already_computed = min(req.already_computed, verdict.prefix_len)
    req.kv.cache_inserted_len = min(req.kv.cache_inserted_len, verdict.prefix_len)
    # SGLang tracks one unfinished chunk, and a chunk that ends early leaves room for another.
    has_chunked = named.get("has_chunked_req") or adder.new_chunked_req is not None
    if verdict.is_chunked and has_chunked:
        return _wait(adder, req)
    end = returns.end_of_chunk(req, verdict.prefix_len)
    if end is not None and verdict.prefix_len + verdict.extend_len > end:
        verdict = dataclasses.replace(
            verdict, extend_len=end - verdict.prefix_len, max_new_tokens=0, is_chunked=True
        )
    return _wait(adder, req) if verdict.is_chunked and has_chunked else verdict


def _wait(adder: Any, req: Any) -> AddReqResult:
    """Have a request wait until another one is done with its chunks, but those behind it only
    once some wait like this: each costs a match. Of a LoRA adapter that is refused SGLang takes
    note as of one that runs."""
    num_passed = getattr(adder, _NUM_PASSED, 0) + 1
    setattr(adder, _NUM_PASSED, num_passed)
    may_pass = num_passed <= MAX_PASSED and req.lora_id is None
    return AddReqResult.CONTINUE if may_pass else AddReqResult.OTHER


def around_add_chunked(original: Callable[..., Any], adder: Any, req: Any) -> Any:
    """Do the same for the next chunk."""
    returns = _returns_of(adder.tree_cache)
    if returns is None:
        return original(adder, req)
    end = returns.end_of_chunk(req, req.prefix_len)
    if end is not None:
        limit = end - req.prefix_len
        own = adder.chunked_req_limit
        adder.chunked_req_limit = limit if own is None else min(limit, own)
    rest = original(adder, req)
    if rest is None:
        returns.admitted(req, is_chunked=False)
    return rest


def after_commit(_: Any, adder: Any, req: Any, admission: Any, *__: Any) -> None:
    """Note that a request is in the next batch, and with what."""
    returns = _returns_of(adder.tree_cache)
    if returns is None or returns.back_of(req.cache_request_handle) is None:
        return
    if req.already_computed:
        # SGLang counts a request's tiers once, as it is first admitted, and a batch's hits
        # each time: what the request had before it yielded is none of this batch's.
        req.cached_tokens_storage += admission.prefix_len - req.already_computed
        adder.log_hit_tokens -= req.already_computed
        _drop_hits(adder, req, admission.prefix_len)
    returns.admitted(req, is_chunked=admission.is_chunked)


def after_stash(_: Any, scheduler: Any, req: Any) -> None:
    """Note that the tree has taken over what a chunk computed."""
    returns = _returns_of(scheduler.tree_cache)
    if returns is not None:
        returns.chunk_ended(scheduler, req)
