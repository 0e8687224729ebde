"""How engines of a bucket learn of each other: one thread lists what others did, one makes what
this server erased and pinned known to them, and durable.

A pass of the first lists the records of erasures, the pins, and the pages from a cursor on. The
cursor is the store's own time of the newest page seen, less a look-back for uploads that take long.
A full listing now and then finds what came later still, and notices what is gone. Its passes are
the probes of an open breaker.

``BucketEngine.erase`` hides at once, on any thread. The keeper's thread writes the record, then
deletes what is listed of it. It also writes pins; what is refused is tried again, and holds up
nobody but itself.
"""

from __future__ import annotations

import random
import threading
from itertools import chain
from typing import TYPE_CHECKING

from sglang_tiered.storage.backoff import Backoff
from sglang_tiered.storage.bucket.erased import (
    MAX_NUMBER,
    Record,
    name_of,
    packed,
    read_records,
    records_of,
)
from sglang_tiered.storage.bucket.index import MAX_STEPS
from sglang_tiered.storage.bucket.names import ROOT, Layout, PageName, namespace_of, parse_page
from sglang_tiered.storage.bucket.pins import alive, pack_pin, read_pin, write_changed
from sglang_tiered.storage.bucket.requests import BucketError, Failure, tried
from sglang_tiered.storage.promises import keep

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from sglang_tiered.storage.bucket.directory import Listed
    from sglang_tiered.storage.bucket.pins import PinChange
    from sglang_tiered.storage.bucket.requests import Requests
    from sglang_tiered.storage.bucket.state import BucketState, PendingErasure


FULL_LISTING_S = 600.0
LOOK_BACK_S = 30.0
"""Uploads take less: a request and its retries. Names are from when they begin."""

_MAX_BYTES = (1 << 32) - 1  # the index has 32 bits for them
_MAX_RENUMBERED = 16
_MAX_LISTINGS = 8
_TOLD_AT_ONCE = 64


class Discovery:
    """Looks for what other servers did; ``run`` is the body of its thread. The keeper asks it to
    learn records, too."""

    def __init__(self, state: BucketState, requests: Requests) -> None:
        self._state = state
        self._requests = requests
        self._newest_s = 0.0  # by the store's clock
        self._last_full = 0.0
        self._next_at = state.clock()
        self._pause = Backoff(state.clock)  # behind a pass that failed
        self._learning = threading.RLock()  # one thread at a time learns records, and tells of them
        self._untold_pause = Backoff(state.clock)  # behind an owner that failed: for that alone

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
        state, breaker = self._state, self._requests.breaker
        while True:
            if self._pause.is_over and not tried("sweeping", self._sweep):
                self._pause.fail()
            self.tell()  # an owner that came late, or that failed
            with state.lock:
                if state.closed:
                    return None
                wait_s = self._next_at - state.clock()
                if breaker.is_open:
                    wait_s = breaker.probes.wait_s
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

    # ---- Records ----

    def learn(self, *, full: bool = False) -> None:
        """Read the records that are new, and tell the owner of them before anything that it stores
        counts as younger; ``full``: also notice what is gone. Raises ``BucketError``."""
        state = self._state
        with self._learning:
            erased, epoch = state.erased, state.epoch  # learned under this lock alone
            after = 0 if full else state.learned
            lowest = read_records(self._requests, self._apply, erased.known, after)
            with state.lock:
                if full and lowest is not None:
                    erased.keep_only(lowest)
                if state.epoch == epoch:
                    state.learned = erased.top
            self.tell()

    def _apply(self, record: Record) -> None:
        """Apply it piece by piece, as lookups wait for each; it is known once all are applied."""
        state, what = self._state, record.what
        is_done = True
        for piece in (None,) if what is None else what.pieces:
            with state.lock:
                is_done = state.apply(record._replace(what=piece))
        if is_done:
            with state.lock:
                state.erased.known[record.name] = record.number

    def tell(self) -> None:
        """Tell the owner, many records at once: it writes to its disk. Where it fails, it is told
        again later, and what it stores until then is dead wherever that names it."""
        state = self._state
        with self._learning:
            while not state.closed:
                with state.lock:
                    told = state.on_erased
                    if told is None or not state.untold:
                        state.seen = max(state.seen, state.learned)
                        return
                    num_records = min(len(state.untold), _TOLD_AT_ONCE)
                    batch = [state.untold.popleft() for _ in range(num_records)]
                pause = self._untold_pause
                if not pause.is_over or not tried("telling of erasures", told, batch):
                    pause.fail()
                    with state.lock:
                        state.untold.extendleft(reversed(batch))
                    return
                pause.succeed()

    # ---- A pass ----

    def _pass(self, full: bool) -> None:
        state = self._state
        with state.lock:
            epoch, layout = state.epoch, state.layout
            full = full or epoch != state.listed_epoch
        full = full or state.clock() - self._last_full >= FULL_LISTING_S
        self.learn(full=full)
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
        oldest_s = 0.0 if ttl_s is None else state.store_time() - ttl_s
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
        return min(newest_s, state.store_time())

    def _is_good(self, listed: Listed, name: PageName, layout: Layout) -> bool:
        """Return whether a page is alive and whole. Needs the lock."""
        state = self._state
        is_whole = listed.size == name.length <= _MAX_BYTES and listed.path not in state.skipped
        page = layout.namespace, name.tenant, name.key, name.stamp
        is_hidden = state.erased.hides(*page) or state.awaits_record((name.key,), name.tenant)
        return is_whole and not is_hidden

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


class Keeper:
    """Makes this server's changes durable; ``run`` is the body of its thread."""

    def __init__(self, state: BucketState, requests: Requests, discovery: Discovery) -> None:
        self._state = state
        self._requests = requests
        self._discovery = discovery
        self._backoff = Backoff(state.clock)

    def run(self) -> None:
        while True:
            orders = self._await_work()
            if orders is None:
                return
            are_erased = tried("erasing", self._erase, orders)
            for order in orders:  # all that was asked before is durable too, or none
                keep(order.durable, are_erased)
            if self._settle_pins() and are_erased:
                self._backoff.succeed()
            else:
                self._backoff.fail()

    def _await_work(self) -> list[PendingErasure] | None:
        """Return the erasures to make durable, those that failed before too; None when closed."""
        state = self._state
        with state.lock:
            while True:
                if state.closed:
                    return None
                has_work = bool(state.orders or state.pins.unsettled)
                pauses_s = self._backoff.wait_s
                if state.is_asked or (has_work and not pauses_s):
                    state.is_asked = False
                    return list(state.orders)
                state.keeper_ready.wait(pauses_s if has_work else None)

    # ---- Erasures ----

    def _erase(self, orders: list[PendingErasure]) -> None:
        """Make erasures durable: what is listed of tenants and namespaces goes, once for all. Of
        single pages those go that are known here, and others with the next collector. Raises
        ``BucketError``."""
        state = self._state
        new = [order for order in orders if not order.number]
        if new:
            self._number(new)
        with state.lock:  # a store under way may still arrive
            under_way = [upload for upload in state.uploading if upload.dropped]
            state.upload_done.wait_for(
                lambda: state.closed or not any(each in state.uploading for each in under_way)
            )
        self._requests.delete([path for order in orders for path in order.pages])
        everywhere = {order.namespace for order in orders if order.what.is_everything}
        if any(order.what.tenant is not None for order in orders):
            found = (namespace_of(folder) for folder in self._requests.folders(ROOT))
            everywhere |= {name for name in found if name is not None}
        for namespace in everywhere:
            self._delete_dead(Layout(namespace))
        for namespace in everywhere | {order.namespace for order in orders}:
            self._clean_pins(Layout(namespace))
        with state.lock:
            for order in orders:
                del state.orders[order]

    def _number(self, orders: Sequence[PendingErasure]) -> None:
        """Write records behind all that are there, one after another: who knows of one must know
        those before. Where another came between, its writer's or ours must be the later one: who
        stored in the knowledge of the first did not know the second."""
        state = self._state
        for attempt in range(_MAX_RENUMBERED):
            self._discovery.learn()
            with state.lock:  # of several at once, the one with the longest step is done
                number = state.erased.top + (random.randrange(64 << attempt) if attempt else 0)
                now = state.store_time()
            ours = records_of([(each.what, each.namespace) for each in orders], number + 1, now)
            if number + len(ours) > MAX_NUMBER:
                raise BucketError(Failure.DENIED, "put has no number left: see the last record")
            objects = dict(packed(ours))
            for path, data in objects.items():
                self._requests.put(path, data)
            self._discovery.learn()
            with state.lock:
                known = state.erased.known.copy()
            names = {each.name for each in ours} | set(map(name_of, objects))
            is_last = not any(n > number and name not in names for name, n in known.items())
            if is_last and names <= known.keys():
                with state.lock:
                    # All of them are known to who has the last one.
                    state.set_numbers(orders, ours[-1].number)
                self._discovery.tell()
                return
        raise BucketError(Failure.UNAVAILABLE, "put came late again and again")

    def _delete_dead(self, layout: Layout) -> None:
        """Delete the pages of a namespace that any record names."""
        state = self._state
        for chunk in self._requests.listing(layout.pages):
            named = [(each.path, parse_page(each.path)) for each in chunk]
            with state.lock:
                gone = [
                    path
                    for path, name in named
                    if name is not None
                    and state.erased.kills(layout.namespace, name.tenant, name.key, name.stamp)
                ]
            self._requests.delete(gone)

    def _clean_pins(self, layout: Layout) -> None:
        """Rewrite pins that name what was erased, as they note what was there, or delete them.
        What memory says of a pin is no word on what the bucket has of it."""
        for _ in range(_MAX_LISTINGS):
            listed = chain.from_iterable(self._requests.listing(layout.pins))
            if all(list(self._requests.each(lambda each: self._clean_pin(layout, each), listed))):
                return
        raise BucketError(Failure.UNAVAILABLE, "put found pins changed again and again")

    def _clean_pin(self, layout: Layout, listed: Listed) -> bool:
        """Return whether nobody changed it meanwhile."""
        state, found = self._state, read_pin(self._requests, layout, listed)
        if found is None:
            return True
        with state.lock:
            pin = alive(*found, state.erased, layout.namespace)
        return write_changed(self._requests, listed, found, pin)

    # ---- Pins ----

    def _settle_pins(self) -> bool:
        """Write all that changed, but for pins of what was erased and has no record yet: they would
        count as older than that. Returns whether nothing is left."""
        state, pins = self._state, self._state.pins
        with state.lock:
            layout, changes = state.layout, dict(pins.unsettled)
            found = {name: pins.book.get(name) for name in changes}
            early = {
                name for name, pin in found.items() if pin and state.is_erased(pin.keys, pin.tenant)
            }
        is_done = not early
        for name in changes.keys() - early:
            if not tried("pinning", self._settle_pin, layout, name, changes[name]):
                is_done = False
                with state.lock:
                    pins.end(changes[name], False)  # and tried again
        return is_done

    def _settle_pin(self, layout: Layout, name: str, change: PinChange) -> None:
        """Write the pin in force, or delete it, unless it changes meanwhile."""
        state, pins = self._state, self._state.pins
        with state.lock:
            if pins.unsettled.get(name) is not change:
                return
            pin, stamp = pins.book.get(name), state.seen
        if pin is None:
            self._requests.delete([layout.pin(name)])
        else:
            self._requests.put(layout.pin(name), pack_pin(pin, stamp))
        with state.lock:
            if pins.unsettled.get(name) is change:
                del pins.unsettled[name]
                if pin is not None:
                    pins.stamps[name] = stamp
                    pins.found[layout.pin(name)] = "", name  # until it is listed
                pins.end(change, True)
