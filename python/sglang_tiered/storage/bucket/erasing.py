"""How erasures of a bucket become known and durable, and pins with them.

``erase`` hides at once, on any thread. The keeper's thread makes it durable: the record first, then
what is listed goes. It also writes pins and deletes what is dead; what is refused is tried again,
and holds up nobody but itself.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
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
from sglang_tiered.storage.bucket.names import ROOT, Layout, namespace_of, parse_page
from sglang_tiered.storage.bucket.pins import (
    PinChange,
    alive,
    pack_pin,
    read_pin,
    write_changed,
)
from sglang_tiered.storage.bucket.requests import BucketError, Failure, tried
from sglang_tiered.storage.promises import all_true, ended, keep

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from sglang_tiered.storage.base import Erasure
    from sglang_tiered.storage.bucket.directory import Listed
    from sglang_tiered.storage.bucket.requests import Requests
    from sglang_tiered.storage.bucket.state import BucketState, OnErased, PendingErasure


logger = logging.getLogger(__name__)

_MAX_RENUMBERED = 16
_MAX_LISTINGS = 8
_TOLD_AT_ONCE = 64


def erase(state: BucketState, what: Erasure) -> Future[bool]:
    """Hide pages; with ``spread`` the keeper makes it durable, for every server: what another one
    told, that does, or after some minutes this one. Memory only."""
    with state.lock:
        if state.closed or what.is_empty:
            return ended(what.is_empty)
        if not what.spread:
            for each in what.pieces:
                state.hide_told(each)
            return ended(True)
        jobs = state.jobs.about(what)
        orders = [state.order(each) for each in what.records]
        state.ask_keeper()
    return state.promises.watch(all_true([order.durable for order in orders], jobs))


class Records:
    """Learns records, and tells the owner of them before anything that it stores counts as younger.
    One thread at a time."""

    def __init__(self, state: BucketState, requests: Requests) -> None:
        self._state = state
        self._requests = requests
        self._lock = threading.RLock()
        self._pause = Backoff(state.clock)  # behind an owner that failed: nothing else waits

    def learn(self, *, full: bool = False) -> None:
        """Read what is new; ``full``: also what is gone. Raises ``BucketError``."""
        state = self._state
        with self._lock:
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
        with self._lock:
            while not state.closed:
                with state.lock:
                    told: OnErased | None = state.on_erased
                    if told is None or not state.untold:
                        state.seen = max(state.seen, state.learned)
                        return
                    num_records = min(len(state.untold), _TOLD_AT_ONCE)
                    batch = [state.untold.popleft() for _ in range(num_records)]
                if not self._pause.is_over or not tried("telling of erasures", told, batch):
                    self._pause.fail()
                    with state.lock:
                        state.untold.extendleft(reversed(batch))
                    return
                self._pause.succeed()


class Keeper:
    """Makes this server's changes durable; ``run`` is the body of its thread."""

    def __init__(self, state: BucketState, requests: Requests, records: Records) -> None:
        self._state = state
        self._requests = requests
        self._records = records
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
            self._records.learn()
            with state.lock:  # of several at once, the one with the longest step is done
                number = state.erased.top + (random.randrange(64 << attempt) if attempt else 0)
                now = state.wall_clock() + state.skew_s
            ours = records_of([(each.what, each.namespace) for each in orders], number + 1, now)
            if number + len(ours) > MAX_NUMBER:
                raise BucketError(Failure.DENIED, "put has no number left: see the last record")
            objects = dict(packed(ours))
            for path, data in objects.items():
                self._requests.put(path, data)
            self._records.learn()
            with state.lock:
                known = state.erased.known.copy()
            names = {each.name for each in ours} | set(map(name_of, objects))
            is_last = not any(n > number and name not in names for name, n in known.items())
            if is_last and names <= known.keys():
                with state.lock:
                    # All of them are known to who has the last one.
                    state.set_numbers(orders, ours[-1].number)
                self._records.tell()
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
            listed = itertools.chain.from_iterable(self._requests.listing(layout.pins))
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
