"""How an engine learns of what others do: one thread that lists, and waits for nothing else.

A pass lists the records of erasures, the pins, and the pages from a cursor on. The cursor is the
store's own time of the newest page seen, less a look-back for uploads that take long. A full
listing now and then finds what came later still, and notices what is gone. Its passes are the
probes of an open breaker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tiered.storage.backoff import Backoff
from sglang_tiered.storage.bucket.index import MAX_STEPS
from sglang_tiered.storage.bucket.names import PageName, parse_page
from sglang_tiered.storage.bucket.pins import alive, read_pin
from sglang_tiered.storage.bucket.requests import BucketError, Failure, tried
from sglang_tiered.storage.promises import keep

if TYPE_CHECKING:
    from concurrent.futures import Future

    from sglang_tiered.storage.bucket.directory import Listed
    from sglang_tiered.storage.bucket.erasing import Records
    from sglang_tiered.storage.bucket.names import Layout
    from sglang_tiered.storage.bucket.requests import Breaker, Requests
    from sglang_tiered.storage.bucket.state import BucketState


FULL_LISTING_S = 600.0
LOOK_BACK_S = 30.0
"""Uploads take less: a request and its retries. Names are from when they begin."""

_MAX_BYTES = (1 << 32) - 1  # the index has 32 bits for them


class Discovery:
    """Looks for what other servers did; ``run`` is the body of the discovery thread."""

    def __init__(
        self, state: BucketState, requests: Requests, breaker: Breaker, records: Records
    ) -> None:
        self._state = state
        self._requests = requests
        self._breaker = breaker
        self._records = records
        self._newest_s = 0.0  # by the store's clock
        self._last_full = 0.0
        self._next_at = state.clock()
        self._pause = Backoff(state.clock)  # behind a pass that failed

    def run(self) -> None:
        state = self._state
        while True:
            orders = self._await_work()
            if orders is None:
                return
            succeeded = tried("listing pages", self._pass, any(full for full, _ in orders))
            if succeeded:
                self._pause.succeed()
            else:
                self._pause.fail()
            for _, future in orders:
                keep(future, succeeded)
            self._next_at = state.clock() + state.settings.refresh_s

    def _await_work(self) -> list[tuple[bool, Future[bool]]] | None:
        """Return the refreshes that the pass now due is for; None when the engine is closed."""
        state = self._state
        while True:
            if self._pause.is_over and not tried("sweeping", self._sweep):
                self._pause.fail()
            self._records.tell()  # an owner that came late, or that failed
            with state.lock:
                if state.closed:
                    return None
                wait_s = self._next_at - state.clock()
                if self._breaker.is_open:
                    wait_s = self._breaker.probes.wait_s
                elif state.listed_epoch != state.epoch:
                    wait_s = 0.0
                wait_s = max(wait_s, self._pause.wait_s)
                if state.refreshes or wait_s <= 0:
                    orders, state.refreshes = state.refreshes, []
                    return orders
                state.discovery_ready.wait(wait_s)

    def _sweep(self, unseen_of: int | None = None) -> None:
        """Remove hidden pages from the index, and behind a full listing of a namespace what that
        did not show, with the lock let go in between."""
        state, unseen = self._state, unseen_of is not None
        with state.lock:
            keys = state.index.keys() if unseen or state.index.num_dead else []
        for start in range(0, len(keys), MAX_STEPS):
            with state.lock:
                if unseen_of is not None:
                    self._check(unseen_of)
                state.index.sweep(keys[start : start + MAX_STEPS], unseen=unseen)

    # ---- A pass ----

    def _pass(self, full: bool) -> None:
        state = self._state
        with state.lock:
            epoch, layout = state.epoch, state.layout
            full = full or epoch != state.listed_epoch
        full = full or state.clock() - self._last_full >= FULL_LISTING_S
        self._records.learn(full=full)
        if "put" not in self._requests.troubles:  # else it stores nothing, either
            with state.lock:
                self._check(epoch)
                state.adopt()
        self._look_at_pins(layout, epoch)
        newest_s = self._look_at_pages(layout, epoch, full=full)
        self._newest_s = max(newest_s, 0.0 if full else self._newest_s)
        with state.lock:
            state.listed_epoch = epoch
        if full:
            self._last_full = state.clock()

    def _check(self, epoch: int) -> None:
        """End the pass when the namespace changed or the engine was closed. Needs the lock."""
        if self._state.closed or self._state.epoch != epoch:
            raise BucketError(Failure.UNAVAILABLE, "list is of another namespace")

    def _look_at_pages(self, layout: Layout, epoch: int, *, full: bool) -> float:
        """List pages; returns the time of the newest one, by the store's clock."""
        state = self._state
        after = None
        if not full and self._newest_s:
            from_s = max(int(self._newest_s - LOOK_BACK_S), 0)
            after = PageName(b"", b"", 0, 0, from_s).stem(layout).partition("-")[0]
        ttl_s = state.settings.ttl_s
        oldest_s = 0.0 if ttl_s is None else state.wall_clock() + state.skew_s - ttl_s
        with state.lock:
            self._check(epoch)
            if full:
                state.index.begin_listing()
        goes_on = ttl_s is not None
        while goes_on:
            with state.lock:
                self._check(epoch)
                goes_on = state.index.expire(oldest_s)
        newest_s = 0.0
        for chunk in self._requests.listing(layout.pages, after=after):
            named = [(each, name) for each in chunk if (name := parse_page(each.path)) is not None]
            newest_s = max([newest_s, *(each.modified for each in chunk)])
            with state.lock:
                self._check(epoch)
                for each, name in named:
                    is_young = each.modified >= oldest_s or state.pins.is_wanted(name.key)
                    if is_young and self._is_good(each, name, layout):
                        state.index.put(name, is_listed=True)
        if full:
            self._sweep(epoch)
        # A time to come, as of a file that was touched, says nothing of what is stored until then.
        return min(newest_s, state.wall_clock() + state.skew_s)

    def _is_good(self, listed: Listed, name: PageName, layout: Layout) -> bool:
        """Return whether a page is alive and whole. Needs the lock."""
        state = self._state
        is_whole = listed.size == name.length <= _MAX_BYTES and listed.path not in state.skipped
        page = layout.namespace, name.tenant, name.key, name.stamp
        is_hidden = state.erased.hides(*page) or state.awaits_record((name.key,), name.tenant)
        return is_whole and not is_hidden

    # ---- Pins ----

    def _look_at_pins(self, layout: Layout, epoch: int) -> None:
        """Read the pins that other servers wrote."""
        state, pins = self._state, self._state.pins
        with state.lock:
            self._check(epoch)
            pins.ours = set(pins.unsettled)
        listed = {e.path: e for chunk in self._requests.listing(layout.pins) for e in chunk}
        news = [e for e in listed.values() if pins.found.get(e.path, ("", ""))[0] != e.tag]
        read = self._requests.each(lambda each: read_pin(self._requests, layout, each), news)
        for each, found in list(zip(news, read, strict=True)):
            with state.lock:
                self._check(epoch)
                name = pins.found.get(each.path, ("", ""))[1] if found is None else found[0].name
                if name in pins.ours:
                    continue
                if found is not None and state.awaits_record(found[0].keys, found[0].tenant):
                    continue  # it may be from before, and is read again
                pins.found[each.path] = each.tag, name
                pin = None if found is None else alive(*found, state.erased, layout.namespace)
                if pin is not None and found is not None:
                    pins.take_up(pin, found[1])
                elif name:
                    pins.drop(name)
        with state.lock:
            self._check(epoch)
            for path in [path for path in pins.found if path not in listed]:
                name = pins.found[path][1]
                if name not in pins.ours:
                    del pins.found[path]
                    pins.drop(name)
            pins.expire()
