"""``Returns``: requests whose front is computed while the back of their prefix loads.

The front is SGLang's: an ordinary request with chunks. The back loads as several of SGLang's
storage operations, each under a handle of its own, read from the last to the first. Until the tree
holds what comes before it, a segment that has arrived stays with its operation, which owns its host
pages and counts them. At a chunk boundary what has arrived is hung into the tree, and the request
yields. It gives its row back, which loses nothing, since the tree has just taken its progress. Then
it goes to the head of the waiting queue, where SGLang matches the device's front and the host's
back.

Scheduler thread only. Several ranks come to the same decisions. What has arrived is the same on all
of them, since SGLang takes note of it in the same step. What a rank's own prices and clock say is
reduced where it decides, at chunk boundaries and while such a request waits.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_tiered.integration.cache.host_locks import HostLocks
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
    from collections.abc import Sequence

    from sglang_tiered.integration.cache.load_planner import LoadPlanner
    from sglang_tiered.integration.cache.loads import PrefetchArguments
    from sglang_tiered.integration.observe.stories import Stories
    from sglang_tiered.storage.base import Span


HANDLE_PREFIX = "both-ends/"
ATTEMPT = -1
"""Of the handles of segments: those of requests, whose names are their clients', count from 0."""
FAR = 1 << 40
"""In place of where a chunk ends: nowhere."""


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

    def __contains__(self, request: CacheRequestHandle) -> bool:
        return self._of(request) is not None

    def _of(self, request: CacheRequestHandle) -> Back | None:
        return self._loads.get(request).back

    def _all(self) -> list[Back]:
        found = map(self._of, self._loads.in_state(State.BOTH_ENDS))
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
        record = self._of(request)
        if record is None or record.reach is None:
            return True
        first = record.segments[0] if record.segments else None
        if first is None or first.start > record.reach or first.has_ended:
            return True
        return self._computes_next(record, record.reach, self._planner.num_others())

    def end_of_chunk(self, req: Any, start: int) -> int | None:
        """Return where a chunk of a request that begins at ``start`` ends at the latest."""
        record = self._of(req.cache_request_handle)
        if record is None:
            return None
        record.req = req
        end = FAR if self._planner.follows else self._own_end(record, start)
        end = self._least(end)
        return None if end == FAR else end

    def _own_end(self, record: Back, start: int) -> int:
        end = end_of_chunk(self._planner.costs, self._left(record), start)
        return FAR if end is None else end

    def _least(self, value: int) -> int:
        """Return the smallest value of all ranks, which make this call in the same place."""
        alone = self._cache.decides_alone
        return value if alone else least_on_every_rank(self._cache, [value])[0]

    def chunk_ended(self, scheduler: Any, req: Any) -> None:
        """Go on, or yield: what comes next has arrived, or is sooner loaded than computed. Called
        when the tree has taken over what a chunk computed."""
        record = self._of(req.cache_request_handle)
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
        record = self._of(req.cache_request_handle)
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
        record = self._of(request)
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
