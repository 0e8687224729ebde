"""Pins of a bucket in memory, this server's and others', and their objects. The owner's lock guards
every call of ``BucketPins``.

A pin is one object, under the digest of its name: who writes last counts. It carries a stamp as
pages do. What was erased since is in none, whatever it says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered.checksummed import seal, unseal
from sglang_tiered.storage.base import KEY_BYTES, PinInfo
from sglang_tiered.storage.promises import keep
from sglang_tiered.storage.region.pins import MAX_PIN_BYTES, Pin, PinBook

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from sglang_tiered.storage.base import Erasure, PinRefusal
    from sglang_tiered.storage.bucket.directory import Listed
    from sglang_tiered.storage.bucket.erased import BucketErasures
    from sglang_tiered.storage.bucket.index import BucketIndex
    from sglang_tiered.storage.bucket.names import Layout
    from sglang_tiered.storage.bucket.requests import Requests


MAX_PINS = 1 << 12
MAX_KEYS = 1 << 19  # of all pins together: some 200 bytes each


class _PinFile(msgspec.Struct, frozen=True, array_like=True):
    stamp: int
    name: str
    tenant: bytes
    until_s: float | None
    keys: bytes  # one behind the other
    data: bytes


PinChange = list["Future[bool]"]
"""Who waits until the pin of a name is written, or deleted where it is gone."""


def pack_pin(pin: Pin, stamp: int) -> bytes:
    keys = b"".join(pin.keys)
    return seal(_PinFile(stamp, pin.name, pin.tenant, pin.until_s, keys, pin.data))


def unpack_pin(data: bytes) -> tuple[Pin, int] | None:
    """Return a pin and its stamp; None for bytes that are none."""
    file = unseal(data, _PinFile)
    if file is None:
        return None
    keys = [file.keys[at : at + KEY_BYTES] for at in range(0, len(file.keys), KEY_BYTES)]
    try:
        return Pin.checked(file.name, keys, file.tenant, file.until_s, file.data), file.stamp
    except ValueError:
        return None


def read_pin(requests: Requests, layout: Layout, listed: Listed) -> tuple[Pin, int] | None:
    """Return a pin and its stamp; None where it is gone or does not verify. A file that is not at
    the path of its pin's name, as one still being written, is none. Raises ``BucketError``."""
    data = requests.whole(listed) if listed.size <= MAX_PIN_BYTES else None
    found = unpack_pin(bytes(data)) if data else None
    return found if found and listed.path == layout.pin(found[0].name) else None


def write_changed(
    requests: Requests, listed: Listed, was: tuple[Pin, int], pin: Pin | None
) -> bool:
    """Write what is left of a pin under its own stamp; delete it where that is nothing. Returns
    whether nobody changed it since it was listed. Raises ``BucketError``."""
    if pin is None:
        requests.delete([listed.path])
    elif pin is not was[0]:
        return requests.replace(listed, pack_pin(pin, was[1]))
    return True


def pin_share(capacity_bytes: int | None) -> int:
    """Return how many bytes pins may keep: half the cap, everything without one."""
    return (1 << 62) if capacity_bytes is None else capacity_bytes // 2


def alive(pin: Pin, stamp: int, erased: BucketErasures, namespace: bytes) -> Pin | None:
    """Return a pin of those of its pages that were not erased since; None if none is left. Where
    some were, its data goes, as that may tell what was there."""
    keys = tuple(key for key in pin.keys if not erased.kills(namespace, pin.tenant, key, stamp))
    if keys == pin.keys:
        return pin
    return replace(pin, keys=keys, data=b"") if keys else None


class BucketPins:
    """The pins of one namespace. What they keep of the index is counted there, in bytes as
    stored."""

    def __init__(
        self, capacity_bytes: int | None, clock: Callable[[], float], index: BucketIndex
    ) -> None:
        self._clock = clock
        self._index = index
        self.unsettled: dict[str, PinChange] = {}  # by names: not yet in the bucket
        self.book = PinBook(pin_share(capacity_bytes), clock)
        self.clear()

    def clear(self) -> None:
        for name in self.book.of_tenant(None):
            self._remove(name)
        self.stamps: dict[str, int] = {}  # of those in the bucket
        self.found: dict[str, tuple[str, str]] = {}  # tags and names, by path, as last listed
        self.ours: set[str] = set()  # names unsettled since the pass of now began
        for change in self.unsettled.values():
            self.end(change, False)
        self.unsettled.clear()

    def is_wanted(self, key: bytes) -> bool:
        return bool(self.book.wanted((key,)))

    def _add(self, pin: Pin) -> None:
        new = self.book.unwanted(pin.keys)
        self.book.add(pin)
        self._index.count_pinned(new, 1)

    def _remove(self, name: str) -> None:
        self._index.count_pinned(self.book.remove(name), -1)

    def refusal(self, pin: Pin) -> PinRefusal | None:
        """Return why a pin cannot be taken, in the place of one of its name."""
        index, freed = self._index, self.book.freed_by(pin)
        asked = index.bytes_of(self.book.unwanted(pin.keys))
        pinned = index.pinned_bytes - index.bytes_of(freed)
        return self.book.refusal(pin, freed, asked, pinned, max_pins=MAX_PINS, max_keys=MAX_KEYS)

    def change(self, name: str, pin: Pin | None, durable: Future[bool]) -> None:
        """Set a pin of this server in force, or let one go; and have that written."""
        self.drop(name)
        if pin is not None:
            self._add(pin)
        self.unsettled[name] = [*self.unsettled.get(name, ()), durable]
        self.ours.add(name)

    def end(self, change: PinChange, outcome: bool) -> None:
        for future in change:
            keep(future, outcome)
        change.clear()

    def take_up(self, pin: Pin, stamp: int) -> None:
        """Set a pin in force that was read."""
        self.drop(pin.name)
        if pin.until_s is None or pin.until_s > self._clock():
            self._add(pin)
            self.stamps[pin.name] = stamp

    def drop(self, name: str) -> None:
        """Forget a pin that is no longer in the bucket, or over."""
        self._remove(name)
        self.stamps.pop(name, None)

    def expire(self) -> None:
        for name in self.book.expired():
            self.drop(name)

    def erase(self, what: Erasure | None, number: int) -> None:
        """Take erased pages out of the pins that are older than a record."""
        if what is not None and what.keys is not None:
            gone = frozenset(what.keys)
            hit = self.book.with_any(gone)
        else:
            gone = frozenset()
            tenant = None if what is None else what.tenant
            hit = [pin for pin in self.book if tenant in (None, pin.tenant)]
        for pin in hit:
            if self.stamps.get(pin.name, -1) >= number:
                continue
            left = tuple(key for key in pin.keys if key not in gone) if gone else ()
            self._remove(pin.name)
            if left:
                self._add(replace(pin, keys=left, data=b""))

    def info(self, name: str) -> PinInfo | None:
        pin = self.book.get(name)
        if pin is None:
            return None
        num_held, num_bytes = sum(self._index.holds(pin.keys)), self._index.bytes_of(pin.keys)
        return PinInfo(name, pin.tenant, num_held, num_bytes, pin.until_s, pin.data)
