"""Watches a cache: each call may change the states of requests' loads as the table here says, and
nothing changes them between two calls.

States are those of ``loads.State``, but for its WAITING, of which LANDED is that whose host copies
are locked, and LOADING: QUEUED has no host memory yet, READING has. GONE has no record, or none in
the queue."""

from __future__ import annotations

import re
from collections import Counter
from functools import wraps
from typing import TYPE_CHECKING, Any

from sglang_tiered.integration.cache.loads import State
from sglang_tiered.integration.cache.returns import HANDLE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle


Transition = tuple[str, str, str]
"""An event, and the states before and after it."""

_STATES = {"GONE", "WAITING", "ASKED", "DEFERRED", "QUEUED", "READING", "LANDED"}
_STATES |= {"BOTH_ENDS"}
_TABLE = """\
asks | any | WAITING, ASKED, DEFERRED, QUEUED, READING, BOTH_ENDS | what was planned
steps, looks | QUEUED | WAITING | too little is left, or given up unread: ``LoadScheduler.revoked``
steps | QUEUED | READING | SGLang has allocated host memory
steps, looks | QUEUED, READING | LANDED, WAITING | it ended, and brought something or nothing
steps | LANDED | DEFERRED, WAITING | nobody can admit it, another could start: ``_make_room``
looks | DEFERRED | WAITING | waiting gains nothing more on some rank: ``stays_put_off``
evicts | LANDED | WAITING | memory of other components' states is short
chunks | BOTH_ENDS | WAITING, GONE | nothing is left to meet, or the last chunk runs
admits | any but QUEUED, READING, BOTH_ENDS | GONE | ``LoadScheduler.leaves``
aborts, resets | any | GONE | SGLang ends the load; the tree was emptied
detaches | any but LANDED, GONE | WAITING, GONE | GONE: it ran from both ends
hides | BOTH_ENDS | WAITING, GONE | weights were replaced, or all that memory holds was hidden
"""


def _named(cell: str) -> set[str]:
    names = set(re.findall(r"[A-Z_]{4,}", cell))
    assert names <= _STATES, cell
    return _STATES - names if cell.startswith("any") else names


def transitions() -> set[Transition]:
    """All that the table allows."""
    rows = [line.split(" | ") for line in _TABLE.splitlines()]
    return {
        (event, before, after)
        for events, sources, targets, _ in rows
        for event in events.split(", ")
        for before in _named(sources)
        for after in _named(targets)
        if before != after
    }


class LoadWatch:
    """Of the requests that ask the cache for a load from now on. ``seen`` counts what happened."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._allowed = transitions()
        self._states: dict[CacheRequestHandle, str] = {}
        self._running: list[str] = []  # events, the innermost last
        self.seen: Counter[Transition] = Counter()
        tiering = cache.tiering
        for owner, method, event in (
            (cache, "prefetch_from_storage", "asks"),
            (cache, "check_hicache_events", "steps"),
            (cache, "check_prefetch_progress", "looks"),
            (cache, "load_has_ended", "looks"),
            (cache, "finish_storage_prefetch_admission", "admits"),
            (cache, "release_aborted_request", "aborts"),
            (cache, "change_weights", "hides"),
            (cache, "reset", "resets"),
            (tiering, "memory_was_hidden", "hides"),
            (tiering, "detached", "detaches"),
            (tiering.loads, "unlock_last_loaded", "evicts"),
            (tiering.returns, "chunk_ended", "chunks"),
            (tiering.returns, "admitted", "chunks"),
        ):
            setattr(owner, method, self._watched(getattr(owner, method), event))

    def _watched(self, call: Callable[..., Any], event: str) -> Callable[..., Any]:
        @wraps(call)
        def watched(*given: Any, **named: Any) -> Any:
            handle = given[0] if given else None
            if str(getattr(handle, "rid", "")).startswith(HANDLE_PREFIX):  # a part of a load
                return call(*given, **named)
            self._look()
            if event == "asks":
                self._states.setdefault(handle, "GONE")
            self._running.append(event)
            try:
                return call(*given, **named)
            finally:
                self._look()
                self._running.pop()

        return watched

    def _look(self) -> None:
        """Compare with what was so when a call last began or ended."""
        event = self._running[-1] if self._running else "nothing"
        for handle, before in list(self._states.items()):
            after = self._states[handle] = self.state_of(handle)
            if before != after:
                found = event, before, after
                if after == "LANDED" and found not in self._allowed:
                    found = event, before, "WAITING"  # it had been asked for again
                assert found in self._allowed, (event, before, after)
                self.seen[found] += 1
            if after == "GONE" and not self._running:
                del self._states[handle]
        planner = self._cache.tiering.planner
        loading = [
            record.load.plan.num_tokens
            for record in planner.loads
            if record.state in (State.LOADING, State.BOTH_ENDS)
            or (record.place is None and record.load is not None and record.load.queued_at)
        ]
        assert sum(planner._loading) == sum(loading)

    def states(self) -> Counter[str]:
        """How many requests are in each state but GONE."""
        self._look()
        return Counter(self._states.values())

    def state_of(self, handle: CacheRequestHandle) -> str:
        """The state of a request. All tables that hold it agree on it."""
        cache, tiering = self._cache, self._cache.tiering
        loads, planner = tiering.loads, tiering.planner
        turns, info = loads._turns, cache.ongoing_prefetch.get(handle)
        record = planner.loads.get(handle)
        state = record.state
        assert (state is State.BOTH_ENDS) == (record.back is not None)
        if state is State.BOTH_ENDS:
            assert record.load.is_back and record.load.queued_at is not None
            return state.name
        is_put_off = state in (State.ASKED, State.DEFERRED)
        assert is_put_off == (record in turns._order)
        assert (info is not None) == (state is State.LOADING)
        if record.place is None:
            assert state is State.WAITING and handle not in loads._locks
            return "GONE"
        if info is not None:
            assert record.load.queued_at is not None
            return "QUEUED" if info.operation.host_indices is None else "READING"
        if is_put_off:
            assert (state is State.DEFERRED) == (record.num_put_off > 0)
        is_landed = state is State.WAITING and handle in loads._locks
        return "LANDED" if is_landed else str(state.name)
