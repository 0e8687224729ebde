"""In memory: the pins of a bucket, this server's and others'. No I/O, no locks: the owner's lock
guards every call.

A pin is an object that is never changed; its name sorts by time, and of several with one name the
last is in force. Pages that were purged or forgotten since are in none, whatever it says: so no
server has to write another one's pin anew.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang_tiered.storage.region.pinning.book import MAX_NOTES_BYTES, PinBook
from sglang_tiered.storage.region.pinning.pins import PinInfo, PinRefusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.storage.object.forgotten import Forgotten
    from sglang_tiered.storage.object.format import Manifest
    from sglang_tiered.storage.object.index import ObjectIndex
    from sglang_tiered.storage.object.names import ObjectId
    from sglang_tiered.storage.object.pending import PinOrder
    from sglang_tiered.storage.region.pinning.pins import Pin

__all__ = ["MAX_KEYS", "MAX_PINS", "ObjectPins", "pin_share"]

MAX_PINS = 1 << 12
MAX_KEYS = 1 << 19  # of all pins together: some 200 bytes each
_MAX_UNPINNED = 4096


def _with(pin: Pin, keys: tuple[bytes, ...]) -> Pin:
    """Return a pin of those of its pages that are left; without its data where some are gone, as
    that may tell what was there."""
    return pin if keys == pin.keys else replace(pin, keys=keys, data=b"")


def pin_share(capacity_bytes: int | None) -> int:
    """Return how many bytes of objects pins may keep: half the cap, everything without one."""
    return (1 << 62) if capacity_bytes is None else capacity_bytes // 2


class ObjectPins:
    """The pins of one namespace. What they keep is counted in whole objects, as these go whole."""

    def __init__(
        self, capacity_bytes: int | None, index: ObjectIndex, clock: Callable[[], float]
    ) -> None:
        self.bound_bytes = pin_share(capacity_bytes)
        self._index = index
        self._clock = clock
        self.orders: deque[PinOrder] = deque()
        self.clear()

    def clear(self) -> None:
        self.book = PinBook(self.bound_bytes, self._clock)
        self.ids: dict[str, ObjectId] = {}  # of the pins in force
        self.versions: dict[ObjectId, str] = {}  # names of all that are in the bucket
        self.unsettled: set[str] = set()  # not yet in the bucket
        self._unpinned: dict[str, int] = {}  # up to when a name is not to be taken up again
        self._objects: dict[str, set[str]] = {}  # that hold the pages of a pin
        self._protect()

    def __len__(self) -> int:
        return len(self.book)

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes of the objects that are kept."""
        return self._index.bytes_of(self._index.pinned)

    def refusal(self, pin: Pin) -> PinRefusal | None:
        """Return why a pin cannot be taken, in the place of one of its name."""
        others = {name for each, held in self._objects.items() if each != pin.name for name in held}
        pinned = self._index.bytes_of(others)
        asked = self._index.bytes_of(self._index.names_of(pin.keys) - others)
        num_keys = self.book.num_keys
        why = ""
        if pinned + asked > self.bound_bytes:
            why = (
                f"objects of {asked} bytes cannot be pinned beside {pinned}: at most "
                f"{self.bound_bytes}"
            )
        elif self.book.get(pin.name) is None and len(self.book) >= MAX_PINS:
            why = f"there are {MAX_PINS} pins already: unpin some"
        elif num_keys + len(pin.keys) - len(self.book.wanted(pin.keys)) > MAX_KEYS:
            why = f"pins name {num_keys} pages already, at most {MAX_KEYS}: unpin some"
        else:
            before = self.book.get(pin.name)
            notes = self.book.data_bytes - (len(before.data) if before else 0) + len(pin.data)
            if notes > MAX_NOTES_BYTES:
                why = f"pins would note {notes} bytes, at most {MAX_NOTES_BYTES}: unpin some"
        return PinRefusal(asked, pinned, self.bound_bytes, why) if why else None

    def put(self, pin: Pin, pin_id: ObjectId) -> None:
        """Set a pin in force."""
        self.book.remove(pin.name)
        self.book.add(pin)
        self.ids[pin.name] = pin_id
        self._objects[pin.name] = self._index.names_of(pin.keys)
        self._protect()

    def take_up(self, pin: Pin, pin_id: ObjectId, forgotten: Forgotten, purged_ms: int) -> None:
        """Set a pin in force that was read, unless it is over, or another is."""
        known = self.ids.get(pin.name)
        if known is not None and known >= pin_id:
            return
        if pin_id.unix_ms <= max(self._unpinned.get(pin.name, -1), purged_ms):
            return
        keys = tuple(key for key in pin.keys if forgotten.of(key) < pin_id.unix_ms)
        if keys and not (pin.until_s is not None and pin.until_s <= self._clock()):
            self.put(_with(pin, keys), pin_id)

    def remove(self, *names: str) -> None:
        for name in names:
            self.book.remove(name)
            self.ids.pop(name, None)
            self.unsettled.discard(name)
            self._objects.pop(name, None)
        self._protect()

    def unpin(self, name: str, until_ms: int) -> None:
        """Let a pin go, and take up none of that name that is as old."""
        self._unpinned[name] = until_ms
        if len(self._unpinned) > _MAX_UNPINNED:
            del self._unpinned[next(iter(self._unpinned))]
        self.remove(name)

    def versions_of(self, name: str) -> list[ObjectId]:
        """Return what is in the bucket under that name and no longer in force."""
        in_force = self.ids.get(name)
        until_ms = self._unpinned.get(name, -1)
        return [
            pin_id
            for pin_id, of in self.versions.items()
            if of == name
            and (pin_id < in_force if in_force is not None else pin_id.unix_ms <= until_ms)
        ]

    def vanished(self, listed: set[ObjectId]) -> None:
        """Let go of what the bucket no longer lists."""
        for pin_id in self.versions.keys() - listed:
            name = self.versions.pop(pin_id)
            if self.ids.get(name) == pin_id and name not in self.unsettled:
                self.remove(name)

    def forget(self, keys: Sequence[bytes], bound_ms: int) -> None:
        """Take pages out of the pins that were made up to then."""
        gone = set(keys)
        for pin in self.book.with_any(gone):
            pin_id = self.ids[pin.name]
            if pin_id.unix_ms <= bound_ms:
                self._keep_only(pin, pin_id, tuple(key for key in pin.keys if key not in gone))

    def purge(self, tenant: bytes | None, bound_ms: int) -> None:
        names = self.book.of_tenant(tenant)
        self.remove(*(name for name in names if self.ids[name].unix_ms <= bound_ms))

    def _keep_only(self, pin: Pin, pin_id: ObjectId, keys: tuple[bytes, ...]) -> None:
        if keys:
            self.put(_with(pin, keys), pin_id)
        else:
            self.remove(pin.name)

    def expire(self) -> None:
        if expired := self.book.expired():
            self.remove(*expired)

    def learns(self, name: str, keys: Sequence[bytes]) -> None:
        """Note the pages of an object that the index is about to learn of."""
        wanted = self.book.wanted(keys) if len(self.book) else ()
        if wanted:
            for pin in self.book.with_any(wanted):
                self._objects[pin.name].add(name)
            self._protect()

    def lack_pages(self) -> bool:
        """Return whether pages that a pin wants are not known to be anywhere."""
        return not all(all(self._index.holds(pin.keys)) for pin in self.book)

    def want(self, manifest: Manifest) -> bool:
        """Return whether a pin wants a page of an object."""
        return bool(self.book.wanted([bytes(key) for key in manifest.pages["key"]]))

    def look_again(self) -> None:
        """Find the objects of all pins anew: pages move to younger ones."""
        for pin in self.book:
            self._objects[pin.name] = self._index.names_of(pin.keys)
        self._protect()

    def info(self, name: str) -> PinInfo | None:
        pin = self.book.get(name)
        if pin is None:
            return None
        num_pages = sum(self._index.holds(pin.keys))
        nbytes = self._index.bytes_of(self._index.names_of(pin.keys))
        return PinInfo(name, pin.tenant, num_pages, nbytes, pin.until_s, pin.data)

    def _protect(self) -> None:
        """Have the index keep these objects, the oldest first, as far as the bound allows."""
        kept: set[str] = set()
        left = self.bound_bytes
        for name in sorted({name for held in self._objects.values() for name in held}):
            left -= self._index.bytes_of({name})
            if left < 0:
                break
            kept.add(name)
        self._index.pinned = kept
