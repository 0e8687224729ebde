"""``PinKeeper``: pins into the bucket and out of it, on the discovery thread.

``pin`` and ``unpin`` change what is in memory at once, on any thread.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from sglang_tiered.storage.object.failures import Failure, RequestError
from sglang_tiered.storage.object.names import Layout, parse_path
from sglang_tiered.storage.object.pending import PinOrder
from sglang_tiered.storage.promises import ended, keep
from sglang_tiered.storage.region.pinning.pins import MAX_PIN_BYTES, pack, unpack

if TYPE_CHECKING:
    from concurrent.futures import Future

    from sglang_tiered.storage.object.client import ObjectClient
    from sglang_tiered.storage.object.names import ObjectId
    from sglang_tiered.storage.object.state import ObjectState
    from sglang_tiered.storage.region.pinning.pins import Pin, PinRefusal

__all__ = ["PinKeeper", "pin", "unpin"]


def pin(state: ObjectState, wanted: Pin) -> Future[bool] | PinRefusal:
    """Keep pages, for ``ObjectEngine.pin``."""
    pins = state.pins
    with state.lock:
        if state.closed:
            return ended(False)
        pins.expire()
        refusal = pins.refusal(wanted)
        if refusal is not None:
            return refusal
        before = pins.ids.get(wanted.name)
        first_ms = max(
            -1 if before is None else before.unix_ms, state.forgotten.latest(wanted.keys)
        )
        pins.put(wanted, state.next_id(wanted.tenant, first_ms + 1))
        pins.unsettled.add(wanted.name)
        return _order(state, wanted.name)


def unpin(state: ObjectState, name: str) -> Future[bool]:
    """Let a pin go, for ``ObjectEngine.unpin``."""
    pins = state.pins
    with state.lock:
        if state.closed:
            return ended(False)
        known = pins.ids.get(name)
        pins.unpin(name, max(state.now_ms(), -1 if known is None else known.unix_ms))
        return _order(state, name)


def _order(state: ObjectState, name: str) -> Future[bool]:
    order = PinOrder(name, state.epoch, state.promises.make())
    state.pins.orders.append(order)
    state.discovery_ready.notify_all()
    return order.durable


class PinKeeper:
    """What failed is tried again behind every pass, which it does not hold up."""

    def __init__(self, state: ObjectState, client: ObjectClient) -> None:
        self._state = state
        self._client = client
        self._unfinished: set[str] = set()

    def serve(self, order: PinOrder) -> None:
        with self._state.lock:
            layout, is_current = self._state.layout, order.epoch == self._state.epoch
        is_done = False
        try:
            if is_current:
                self._settle(layout, order.name)
                is_done = True
        except RequestError:
            self._unfinished.add(order.name)
        finally:
            keep(order.durable, is_done)

    def retry(self) -> None:
        """Try again what failed, whether or not anybody asks again."""
        with self._state.lock:
            layout = self._state.layout
        for name in list(self._unfinished):
            with contextlib.suppress(RequestError):
                self._settle(layout, name)
                self._unfinished.discard(name)

    def look(self, layout: Layout, epoch: int) -> None:
        """Read the pins of other servers. Raises ``RequestError``."""
        state = self._state
        with state.lock:
            known = set(state.pins.versions) if state.epoch == epoch else set()
        listed = {
            pin_id
            for chunk in self._client.listing(layout.pins)
            for each in chunk
            if (pin_id := parse_path(each.path)) is not None
        }
        for pin_id in sorted(listed - known):
            self._learn(layout, pin_id)
        with state.lock:
            if state.epoch == epoch:
                state.pins.vanished(listed)
                state.pins.expire()

    def _settle(self, layout: Layout, name: str) -> None:
        """Write the pin in force, and delete those of its name that are not."""
        state = self._state
        with state.lock:
            pin_id = state.pins.ids.get(name)
            wanted = state.pins.book.get(name) if name in state.pins.unsettled else None
        if wanted is not None and pin_id is not None:
            self._client.put(layout.pin(pin_id), pack(wanted))
        elif pin_id is None:  # unpinned: another server's may not be known yet
            for chunk in self._client.listing(layout.pins):
                for listed in chunk:
                    self._learn(layout, parse_path(listed.path))
        with state.lock:
            if wanted is not None and pin_id is not None:
                state.pins.versions[pin_id] = name
                if state.pins.ids.get(name) == pin_id:
                    state.pins.unsettled.discard(name)
            over = state.pins.versions_of(name)
        self._client.delete([layout.pin(each) for each in over])
        with state.lock:
            for each in over:
                state.pins.versions.pop(each, None)

    def _learn(self, layout: Layout, pin_id: ObjectId | None) -> None:
        state = self._state
        with state.lock:
            if pin_id is None or pin_id in state.pins.versions:
                return
        found = self._read(layout, pin_id)
        with state.lock:
            if state.layout != layout:
                return
            state.pins.versions[pin_id] = "" if found is None else found.name  # damaged, or newer
            if found is not None:
                purged_ms = state.bounds.of(found.tenant)
                state.pins.take_up(found, pin_id, state.forgotten, purged_ms)

    def _read(self, layout: Layout, pin_id: ObjectId) -> Pin | None:
        try:
            return unpack(bytes(self._client.get(layout.pin(pin_id), MAX_PIN_BYTES)))
        except RequestError as error:
            if error.failure is not Failure.NOT_FOUND:
                raise
            return None
