"""Watches a cache: each call may change the states of requests' loads as the table in the room's
README says, and nothing changes them between two calls."""

from __future__ import annotations

import re
from collections import Counter
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sglang_tiered.integration.cache as room
from sglang_tiered.integration.cache.loads import State
from sglang_tiered.integration.cache.returns import HANDLE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle


Transition = tuple[str, str, str]
"""An event, and the states before and after it."""

_PAGE = Path(next(iter(room.__path__))) / "README.md"


def _rows(heading: str) -> Iterator[list[str]]:
    """The cells of a table of the page, by its first heading."""
    lines = _PAGE.read_text(encoding="utf-8").splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def _named(cell: str, states: set[str]) -> set[str]:
    names = set(re.findall(r"[A-Z_]{4,}", cell))
    assert names <= states, cell
    return states - names if cell.startswith("any") else names


def transitions() -> set[Transition]:
    """All that the table allows."""
    states = {row[0] for row in _rows("state")}
    return {
        (event, before, after)
        for events, sources, targets, *_ in _rows("event")
        for event in events.split(", ")
        for before in _named(sources, states)
        for after in _named(targets, states)
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
            or (record.load is not None and record.load.is_ahead and record.load.queued_at)
        ]
        assert sum(planner._loading) == sum(loading)

    def states(self) -> Counter[str]:
        """How many requests are in each state but GONE."""
        self._look()
        return Counter(self._states.values())

    def state_of(self, handle: CacheRequestHandle) -> str:
        """The state of a request. All tables that the page names for it agree on it."""
        cache, tiering = self._cache, self._cache.tiering
        loads, planner = tiering.loads, tiering.planner
        window, info = loads._window, cache.ongoing_prefetch.get(handle)
        record = planner.loads.get(handle)
        state = record.state
        assert (state is State.BOTH_ENDS) == (handle in tiering.returns)
        if state is State.BOTH_ENDS:
            assert record.load.is_back and record.load.queued_at is not None
            return state.name
        is_put_off = state in (State.ASKED, State.DEFERRED)
        assert is_put_off == (record.put_off in window._order)
        assert (info is not None) == (state is State.LOADING)
        if record.place is None:
            assert state is State.WAITING and handle not in loads._locks
            return "GONE"
        if info is not None:
            assert record.load.queued_at is not None
            return "QUEUED" if info.operation.host_indices is None else "READING"
        if is_put_off:
            assert (state is State.DEFERRED) == (record.put_off.num_tokens > 0)
        is_landed = state is State.WAITING and handle in loads._locks
        return "LANDED" if is_landed else str(state.name)
