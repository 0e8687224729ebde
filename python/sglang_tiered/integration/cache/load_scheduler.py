"""``LoadScheduler``: which loads begin, how much of a prefix, and how long a request waits for one.

Stands between SGLang's prefetch calls and the planner. Every method runs on the scheduler thread
and none waits for a disk.

With several ranks every decision must come out the same on all of them. But what a rank's own shard
holds may differ after a crash, as may what it has measured. So with tensor parallelism each rank
makes its own plan and all load what the shortest plan says (``ranks``). The window works
from token counts, which SGLang keeps equal on all ranks, and ends of waiting are reduced by SGLang.
With pipeline parallelism SGLang decides alone.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.utils.rank_consensus_checker import assert_same

from sglang_tiered.integration.cache.hiding_cache import HostLocks
from sglang_tiered.integration.cache.loads import (
    State,
    Turns,
    allocate_now,
    restorable_ends,
)
from sglang_tiered.integration.cache.small_host import note_absent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

    from sglang_tiered.integration.cache.hiding_cache import HidingCache
    from sglang_tiered.integration.cache.load_planner import LoadPlanner
    from sglang_tiered.integration.cache.loads import PrefetchArguments, RequestLoad
    from sglang_tiered.integration.cache.returns import Returns
    from sglang_tiered.integration.cache.spiller import Spiller
    from sglang_tiered.integration.observe.stories import Stories
    from sglang_tiered.integration.ranks import RankAgreement
    from sglang_tiered.integration.storage.backend import TieredStorage
    from sglang_tiered.request_log import Why
    from sglang_tiered.storage.base import Span


DECLINED, ABSENT = -1, -2
"""What a rank answers in place of where a load ends: that computing is sooner, or that its tiers
hold nothing. The least answer counts, so a prefix that one rank lacks is not declined."""

MAX_ASKS_PER_STEP = 16
"""Put-off requests that are looked at in one step: so many in queue order, and as many in turn,
since any may have waited for long enough. With a thousand, the step must not pay for each."""

MAX_ANSWERS_PER_STEP = 256
"""The first of those that wait only for the answer of other ranks, which is there or not."""

MAX_LOOKS_PER_STEP = 8
"""Loads under way for which a step asks whether to wait on: so many in queue order, and as many in
turn, so that one that hangs behind others is found. Those that have ended are not among them."""

LOOKED_AT = {
    State.ASKED: MAX_ANSWERS_PER_STEP,
    State.DEFERRED: MAX_ASKS_PER_STEP,
    State.LOADING: MAX_LOOKS_PER_STEP,
}

GIVES_WAY_STEPS = 8
"""Steps after which a request whose load has ended, and that was not admitted, keeps no room from
one that could start: it waits for an adapter's slot, say, or for a decode server."""


def told_end(end: int, *, has_back: bool = False) -> int:
    """Return what a rank tells of where a load ends: the smaller, the less it loads; of equal ends
    the one counts of which nothing is read from the back."""
    return 2 * end + has_back


def _gain_of(request: CacheRequestHandle) -> tuple[str, CacheRequestHandle]:
    """Name the question that ranks ask about a request whose load was put off."""
    return "gains by its turn", request


class LoadScheduler:
    """See the module docstring. At most ``window_tokens`` are loading or wait to be used."""

    def __init__(
        self,
        cache: HidingCache,
        planner: LoadPlanner[CacheRequestHandle],
        agreement: RankAgreement,
        stores: Spiller,
        backs: Returns,
        *,
        window_tokens: int,
        notes: Stories,
    ) -> None:
        # SGLang compiles its hash of pages at first use, which no request should wait for.
        get_storage_hash_str(array("q", [0]), page_size=1)
        self._cache = cache
        self.planner = planner
        self._requests = planner.loads
        self.agreement = agreement
        self._stores = stores
        self._backs = backs
        self._notes = notes
        self._turns = Turns(window_tokens)
        self._num_steps = 0
        # In this step, of the requests in a state: how many more are looked at in queue order, and
        # in how many steps each of the others has its turn.
        self._num_left = dict.fromkeys(LOOKED_AT, 0)
        self._strides = dict.fromkeys(LOOKED_AT, 0)
        self._num_unused: int | None = None  # host tokens that were loaded; None until counted
        # Of what was loaded for requests that were not admitted yet.
        self._locks: HostLocks[CacheRequestHandle] = HostLocks(cache)

    # ---- A load begins ----

    def begin_load(self, call: PrefetchArguments) -> bool | None:
        """Have SGLang load what pays of a prefix; nothing, or not yet, where that is best."""
        if not call.request.rid.startswith(HEALTH_CHECK_RID_PREFIX):  # on a quiet server, most
            self._requests.arrives(call.request)
        self._backs.drop(call.request)
        storage = self._cache.storage
        return self._begin(call) if storage is None else self._plan(call, storage)

    def _plan(self, call: PrefetchArguments, storage: TieredStorage) -> bool | None:
        """Begin to load what of a request's prefix is best; None for nothing, or not yet.

        A scheduler that decides alone begins the load of a request that has just come at once; a
        cold request returns at once and is admitted in the same pass. Several ranks agree in the
        next step, for which the request is put off. So is a load that would overfill the window, or
        that waits for stores to leave it room, until ``load_has_ended`` reaches the request again.
        SGLang drops it at that point, and with it the prefix, whenever more requests return
        together than half the host tier holds.
        """
        cache, request, tokens = self._cache, call.request, call.new_input_tokens
        record = self._requests.get(request)
        is_new = record.place is None and not record.has_run  # which is in the middle of a step
        has_waited = record.state is State.DEFERRED
        self._withdraw(request)
        began_at = self._notes.clock()
        spans = storage.lookup_spans(chain := cache.page_hashes(call.new_key, call.last_hash))
        hashes = chain[: sum(span.num_pages for span in spans)]
        self._notes.looked_up(
            request, began_at, num_before=call.num_before, num_new=len(tokens) + 1, spans=spans
        )
        ends = restorable_ends(cache, call.last_host_node_id, hashes, storage)
        if ends is not None:
            hashes = hashes[: ends[-1] // cache.page_size if ends else 0]
        num_held = len(hashes) * cache.page_size
        num_ahead = self._backs.num_ahead()
        num_planned = self.planner.arrives(
            request,
            num_held=num_held,
            num_new=len(tokens) + 1,
            num_before=call.num_before,
            num_ahead=num_ahead,
            spans=spans,
            ends=ends,
            rank=record.rank,
        )
        has_back = self._backs.pays(call, num_held, ends)
        if has_back:
            num_planned = num_held
        self._probe_declined(storage, hashes, spans, num_planned // cache.page_size)
        agreed = self._agree_on_end(request, num_planned, num_held, call.num_before, has_back)
        if agreed is None:
            self._put_off(request, 0, "ranks")
            return None
        end, has_back = agreed
        num_agreed = self._num_agreed(request, end, call.num_before, len(tokens))
        is_load = num_agreed >= cache.prefetch_threshold
        self._note_absent(end, chain, num_held if cache.decides_alone else num_agreed)
        num_back = self._backs.num_loaded(call, num_agreed) if has_back else 0
        has_back, num_loaded = num_back > 0, (num_back or num_agreed) * is_load
        self.planner.agreed(request, num_loaded, num_ahead=num_ahead, is_back=has_back)
        self._notes.planned(
            request,
            num_held=num_held,
            num_loaded=num_loaded,
            num_ahead=num_ahead,
            is_declined=end == DECLINED,
            is_back=has_back,
        )
        if not is_load:
            self._drop_questions(request)
            return None
        # One that has just come overtakes nobody who waits for room.
        ask = self._turns.has_room if has_waited else self._turns.has_room_for_next
        why: Why | None = None if ask(num_agreed, self.num_tokens()) else "window"
        if why is None and self._stores_in_the_way(num_agreed, storage):
            why = "stores"
        has_path = why is None and self._stores.has_host_path(call.last_host_node_id)
        if why is not None or has_path is None:
            self._put_off(request, num_agreed, why or "copies")
            return None
        self._drop_questions(request)
        if not has_path:
            self._notes.given_up(request, "no_host_path", num_loaded)
            return None
        pages = chain[: num_agreed // cache.page_size]  # whatever this rank's tiers hold by now
        if has_back:
            self._backs.begin(call, pages, spans, is_new=is_new)
            return None
        tokens = tokens[: num_agreed + int(cache.tree_core.is_eagle)]
        return self._begin(call._replace(new_input_tokens=tokens), pages, is_new=is_new)

    def _note_absent(self, end: int, chain: list[str], num_held: int) -> None:
        """Have what the tiers lack of a prefix stored again, unless a load of it was declined."""
        if end != DECLINED:
            note_absent(self._cache, chain, num_held // self._cache.page_size)

    def _begin(
        self, call: PrefetchArguments, pages: Sequence[str] = (), *, is_new: bool = False
    ) -> bool | None:
        """Have SGLang load these pages, which may decline. ``is_new``: the request has just come,
        so this is between two steps."""
        request = call.request
        result: bool | None = self._cache.begin_load(call, pages)
        if request not in self._cache.ongoing_prefetch:
            self._notes.given_up(request, "refused", len(call.new_input_tokens))
            return result
        self._notes.begun(request)
        self.planner.begins(request)
        self._requests.move(request, State.LOADING)
        record = self._requests.get(request)
        whole = array("q", call.matched_prefix_tokens or ()) + array("q", call.new_input_tokens)
        record.key = RadixKey(whole, extra_key=call.extra_key, cache_salt=call.cache_salt)
        if is_new and self._cache.decides_alone:  # a repeated attempt may be within a step
            allocate_now(self._cache)
        return result

    def comes(self, req: Any, max_attempts: int, rank: int = 0) -> None:
        """Take note of SGLang's request whose load is planned next, and that goes before those of
        larger ranks. An attempt that was asked for here is none of the ``max_attempts`` of SGLang's
        own, after which it makes none at all."""
        record = self._requests.of(req.cache_request_handle)
        req.storage_prefetch_retry_attempts -= record.is_own_attempt
        record.is_own_attempt = False
        record.is_last_attempt = req.storage_prefetch_retry_attempts >= max_attempts
        record.rank = rank

    def _attempt(self, request: CacheRequestHandle) -> None:
        """Have SGLang ask for a load with a fresh match, in its next pass."""
        self._requests.get(request).is_own_attempt = True
        self._cache.storage_prefetch_retries.refetch(request.rid)

    def _put_off(self, request: CacheRequestHandle, num_tokens: int, why: Why) -> None:
        record = self._requests.get(request)
        if record.is_last_attempt:
            self._notes.given_up(request, "turn", num_tokens)
            self._drop_questions(request)
            return
        self._notes.put_off(request, why)
        self._defer(request, num_tokens)
        if why == "copies":  # which the next step makes
            self._turns.could_start(record)

    def _defer(self, request: CacheRequestHandle, num_tokens: int, *, rests: bool = False) -> None:
        self._withdraw(request)
        self._requests.move(request, State.DEFERRED if num_tokens else State.ASKED)
        record = self._requests.get(request)
        assert record.place is not None
        record.place.counts = False
        self._turns.put_off(record, num_tokens, rests=rests)

    def _withdraw(self, request: CacheRequestHandle) -> None:
        """Put the load of a request off no longer."""
        record = self._requests.get(request)
        if record.num_put_off is not None:
            self._turns.withdraw(record)
            self._requests.move(request, State.WAITING)

    def _attempt_put_off(self) -> None:
        """Let SGLang attempt the put-off loads whose turn has come, in this step: their requests
        may be far from their own admission. Where loads wait for stores too, that is asked at the
        admission alone."""
        if (first := self._turns.first_ready()) is not None:
            self._make_room(first.num_put_off or 0)
        for request in self._turns.take(self.num_tokens(), only_ready=self._cache.has_small_host):
            self._attempt(request)

    def _make_room(self, num_tokens: int) -> None:
        """Have ended loads of requests that nobody can admit give way. What they brought may be
        evicted, and if so is loaded again once its request could start."""
        buffer = self._cache.buffer_pipeline
        for request in reversed(list(self._locks if buffer is None else buffer.staged_prefetches)):
            if self._turns.has_room(num_tokens, self.num_tokens()):
                return
            record = self._requests.get(request)
            is_recent = self._num_steps - record.landed_at < GIVES_WAY_STEPS
            # It may have lost a part, which loads again, or is to be planned or attempted.
            if is_recent or record.state in (State.LOADING, State.BOTH_ENDS):
                continue
            self.unlock_loaded(request)
            if buffer is not None:
                buffer.release_staged_hold(request)
            self._cache.pop_prefetch_loaded_span(request)
            if record.state is State.WAITING and not record.is_last_attempt:
                self._notes.put_off(request, "window")
                self._defer(request, record.num_landed, rests=True)

    def _stores_in_the_way(self, num_tokens: int, storage: TieredStorage) -> int:
        return self._stores.stores_in_the_way(num_tokens, storage, num_loading=self.num_tokens())

    def _agree_on_end(
        self,
        request: CacheRequestHandle,
        num_planned: int,
        num_held: int,
        num_before: int,
        has_back: bool,
    ) -> tuple[int, bool] | None:
        """Return after how many tokens of its prompt a load ends on all ranks, ``DECLINED`` or
        ``ABSENT``, and whether it is read from the back; None until they agree. They do so on its
        end, for the match may have moved when the answer is there."""
        least = self._cache.prefetch_threshold
        nothing = DECLINED if num_held >= least else ABSENT
        own = told_end(num_before + num_planned, has_back=has_back)
        told = self.agreement.ask_ranks(request, own if num_planned >= least else nothing)
        if told is None or told < 0:
            return None if told is None else (told, False)
        return told // 2, bool(told % 2)

    def _num_agreed(
        self, request: CacheRequestHandle, end: int, num_before: int, num_tokens: int
    ) -> int:
        """Return what all ranks load of ``num_tokens`` behind ``num_before``."""
        page_size = self._cache.page_size
        num_agreed = min(max(0, end - num_before), num_tokens) // page_size * page_size
        assert_same("load of %s: %d tokens", request.rid, num_agreed)
        return int(num_agreed)

    def _drop_questions(self, request: CacheRequestHandle) -> None:
        self.agreement.drop_question(request)
        self.agreement.drop_question(_gain_of(request))

    def _probe_declined(
        self, storage: TieredStorage, hashes: list[str], spans: list[Span], num_planned: int
    ) -> None:
        """Measure the tier that a plan stopped short of, unless it was measured lately."""
        end = 0
        for span in spans:
            start, end = end, end + span.num_pages
            if end > num_planned:
                if self.planner.wants_probe(span.tier):
                    storage.probe_tier(hashes[max(start, num_planned) : end], span.tier)
                return

    # ---- While it runs ----

    def has_loaded(
        self, request: CacheRequestHandle, ask_sglang: Callable[[CacheRequestHandle], Any]
    ) -> bool:
        """Whether a request whose turn has come need not wait for its load."""
        record = self._requests.get(request)
        if record.back is not None:
            has_loaded = self._backs.may_start(request)
        elif self.rests(record):
            has_loaded = False
        elif record.num_put_off is not None:
            has_loaded = not self._stays_put_off(record, record.num_put_off)
        else:
            has_loaded = bool(ask_sglang(request))
        if not has_loaded:
            self._requests.held_up(record)
        return has_loaded

    def num_tokens(self) -> int:
        """Return the host tokens of loads in flight and of loads not yet used by their request."""
        if self._num_unused is None:
            landed = {each: self._requests.get(each).num_landed for each in self._locks}
            unused = {**self._cache.prefetch_loaded_tokens_by_reqid, **landed}
            # SGLang counts what waits in a buffer itself, until it goes to the device.
            is_buffer = self._cache.buffer_pipeline is not None
            self._num_unused = 0 if is_buffer else sum(unused.values())
        return int(self._cache.cache_controller.prefetch_tokens_occupied) + self._num_unused

    def step(self) -> None:
        """Begin a step of the scheduler."""
        self.planner.step()
        self._num_steps += 1
        self._num_unused = None
        self._attempt_put_off()
        self._num_left = LOOKED_AT.copy()
        self._strides = {
            state: self._requests.num_in(state) // most for state, most in LOOKED_AT.items()
        }

    def rests(self, record: RequestLoad) -> bool:
        """Whether a request waits for a load and is not looked at again in this step. Decided by
        what all ranks know: the order of the questions, and in which the requests arrived."""
        state, place = record.state, record.place
        if state not in LOOKED_AT or place is None:
            return False
        if self._num_left[state] > 0:
            self._num_left[state] -= 1
            return False
        stride = self._strides[state]
        has_turn = stride <= 1 or (place.number + self._num_steps) % stride == 0
        return state is State.ASKED or not has_turn

    def keeps_room(self, request: CacheRequestHandle) -> None:
        """Note that a request waits, but for no load and for nothing that others need not wait
        for, so what was loaded for it gives way to no other load."""
        self._requests.get(request).landed_at = self._num_steps

    def _stays_put_off(self, record: RequestLoad, num_tokens: int) -> bool:
        """Whether a request whose load of so many tokens was put off goes on waiting."""
        storage, request = self._cache.storage, record.request
        if storage is None:
            return False
        if num_tokens == 0:  # it waits for the other ranks alone
            self._attempt(request)
            return True
        in_the_way = self._stores_in_the_way(num_tokens, storage)
        if not self._gains_by_its_turn(request, in_the_way, storage):
            self._notes.given_up(request, "turn", num_tokens)
            self._withdraw(request)
            self._drop_questions(request)
            return False
        if not in_the_way:
            self._turns.could_start(record)
        return True

    def _gains_by_its_turn(
        self,
        request: CacheRequestHandle,
        num_stored_first: int,
        storage: TieredStorage,
    ) -> bool:
        """Whether waiting still pays on every rank, as far as that is known: several ranks answer
        each other in the next step."""
        # A store is taken to last as long as a load.
        gains = storage.serves_loads and self.planner.gains_by_its_turn(
            request, num_ahead=self._backs.num_ahead() + num_stored_first
        )
        question = _gain_of(request)
        answer = self.agreement.ask_ranks(question, int(gains))
        if answer is not None:
            self.agreement.drop_question(question)
        return answer != 0

    def starts_without(self, operation: Any, *, is_overdue: bool) -> bool:
        """Whether a request starts with what has arrived of its load. ``is_overdue``: by SGLang's
        own deadline, which bounds only loads that no price does. SGLang reduces it over ranks."""
        storage = self._cache.storage
        if storage is not None and self._gains_nothing(operation, storage):
            return True
        if is_overdue and (storage is None or self.planner.always):
            num_missing = operation.stats_requested_tokens - operation.completed_tokens
            self._notes.given_up(operation.handle, "deadline", num_missing)
            return True
        return False

    def _gains_nothing(self, operation: Any, storage: TieredStorage) -> bool:
        """Whether computing the rest is sooner by now, the request was held up for long enough, or
        the tier stopped serving."""
        if not storage.serves_loads:
            self._notes.given_up(operation.handle, "tier")
            return True
        is_read = operation.host_indices is not None
        num_planned = operation.storage_hit_count if is_read else operation.stats_requested_tokens
        num_missing = num_planned - operation.completed_tokens
        # With states of other components SGLang drops a load of which anything is missing.
        is_all_or_nothing = any(
            transfer.indices_from_pool != PoolName.KV for transfer in operation.pool_transfers or ()
        )
        lacks_states = is_all_or_nothing and not operation.pool_transfers_done
        if num_missing <= 0 and not lacks_states:
            return False
        occupied = self._cache.cache_controller.prefetch_tokens_occupied
        waits = self.planner.should_wait(
            operation.handle,
            num_missing=num_missing,
            num_before=operation.storage_start + operation.completed_tokens,
            num_ahead=0 if is_read else max(0, occupied - num_planned),
            is_read=is_read,
            num_lost=operation.completed_tokens if is_all_or_nothing else 0,
        )
        if not waits:
            self._notes.given_up(operation.handle, "late", num_missing)
        return not waits

    # ---- It has ended ----

    def revoked(self, request: CacheRequestHandle) -> None:
        """Look no more at a load that SGLang gave up unread."""
        self._notes.given_up(request, "revoked")
        self.planner.load_ended(request)
        self._requests.get(request).key = None

    def ended(self, request: CacheRequestHandle, num_loaded: int) -> None:
        """Keep in host memory what a load brought until its request is admitted. In a long queue
        the loads of later requests would evict it before."""
        self._notes.load_ended(request, num_loaded)
        self.planner.load_ended(request)
        self.unlock_loaded(request)
        record = self._requests.get(request)
        key, record.key = record.key, None
        if key is None or num_loaded == 0:
            return
        if self._cache.buffer_pipeline is not None:
            record.num_landed, record.landed_at = num_loaded, self._num_steps
            return
        node_id = self._cache.match_prefix(MatchPrefixParams(key=key)).best_match_node
        core = self._cache.tree_core
        if not core.is_root(node_id) and core.is_backuped(node_id):
            record.num_landed, record.landed_at = num_loaded, self._num_steps
            self._locks.lock(request, node_id)

    def unlock_loaded(self, request: CacheRequestHandle) -> None:
        """Let what was loaded for a request be evicted."""
        self._num_unused = None
        self._locks.unlock(request)

    def unlock_last_loaded(self) -> bool:
        """Let what was loaded last be evicted before its request is admitted; return False if
        nothing is locked."""
        last = next(reversed(list(self._locks)), None)
        if last is not None:
            self.unlock_loaded(last)
        return last is not None

    def leaves(self, request: CacheRequestHandle) -> None:
        """Load nothing more for a request, which was admitted: the copy to the device locks what
        was loaded."""
        self._notes.admitted(request)
        self._stop(request)
        self.planner.leaves(request)

    def drop(self, request: CacheRequestHandle) -> None:
        """Drop a request that was aborted, or a part of its load."""
        self._backs.drop(request)
        self._notes.aborted(request)
        self._stop(request)
        self.planner.drop(request)

    def _stop(self, request: CacheRequestHandle) -> None:
        self._withdraw(request)
        self._drop_questions(request)
        self.unlock_loaded(request)

    def has_room_ahead(self, num_tokens: int) -> bool:
        """Whether a load for which no request waits may begin: it overtakes none that one does."""
        is_idle = not self._cache.ongoing_prefetch
        return is_idle and self._turns.has_room_for_next(num_tokens, self.num_tokens())

    def waits_for_room(self) -> bool:
        """Whether a request's load waits until others leave it room."""
        return self._turns.wait_for_room

    def detached(self) -> None:
        """End all waiting for turns."""
        for request in self._requests.in_state(State.ASKED, State.DEFERRED):
            self._withdraw(request)
        self.agreement.drop_all()

    def clear(self) -> None:
        """Drop all loads: the tree was emptied."""
        self._num_unused = None
        self._locks.clear()
        self._num_left = dict.fromkeys(LOOKED_AT, 0)
        self._turns.clear()
        self.planner.clear()
        self.agreement.drop_all()
