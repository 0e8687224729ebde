"""In memory: the pins of a store. No I/O, no locks: the owner's lock guards every call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sglang_tiered.storage.region.pinning.pins import Pin

__all__ = ["MAX_KEYS", "MAX_PINS", "PinBook"]

MAX_PINS = 1 << 14
MAX_KEYS = 1 << 20  # of all pins together: about 130 bytes of memory each
MAX_NOTES_BYTES = 256 << 20  # of the notes of all pins, which lie in memory


class PinBook:
    """Pins by name, and how many of them want each page. ``bound_bytes`` is what pages of pins may
    take together; with 0 nothing can be pinned. ``clock`` gives seconds since 1970."""

    def __init__(self, bound_bytes: int, clock: Callable[[], float]) -> None:
        self.bound_bytes = bound_bytes
        self.left_out = False  # pages that were wanted and found no room within the bound
        self._clock = clock
        self._pins: dict[str, Pin] = {}
        self._counts: dict[bytes, int] = {}
        self.data_bytes = 0
        self._first_expiry: float | None = math.inf  # None: to be looked for

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._pins.values()))

    @property
    def num_keys(self) -> int:
        return len(self._counts)

    def get(self, name: str) -> Pin | None:
        return self._pins.get(name)

    def add(self, pin: Pin) -> None:
        """Enter a pin whose name is not there."""
        assert pin.name not in self._pins, f"the pin {pin.name!r} is there twice"
        self._pins[pin.name] = pin
        self.data_bytes += len(pin.data)
        for key in pin.keys:
            self._counts[key] = self._counts.get(key, 0) + 1
        if pin.until_s is not None and self._first_expiry is not None:
            self._first_expiry = min(self._first_expiry, pin.until_s)

    def remove(self, name: str) -> list[bytes]:
        """Take a pin out, if it is there; returns the keys that no other wants."""
        pin = self._pins.pop(name, None)
        freed = []
        self.data_bytes -= len(pin.data) if pin is not None else 0
        for key in pin.keys if pin is not None else ():
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                freed.append(key)
        if pin is not None and pin.until_s == self._first_expiry:
            self._first_expiry = None
        return freed

    def wanted(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return those keys that a pin wants."""
        return [key for key in keys if key in self._counts]

    def wanted_by(self, pin: Pin, *, but: Pin) -> list[bytes]:
        """Return the keys that no pin wants but one, which is there, and that another, which may
        take its place, does not want."""
        kept = set(but.keys)
        return [key for key in pin.keys if self._counts[key] == 1 and key not in kept]

    def of_tenant(self, tenant: bytes | None) -> list[str]:
        """Return the names of a tenant's pins; of all for None."""
        return [pin.name for pin in self._pins.values() if tenant in (None, pin.tenant)]

    def with_any(self, keys: Iterable[bytes]) -> list[Pin]:
        """Return the pins that want any of these pages."""
        gone = {key for key in keys if key in self._counts}
        return [pin for pin in self._pins.values() if gone and not gone.isdisjoint(pin.keys)]

    def notes_of(self, tenant: bytes) -> list[tuple[str, bytes]]:
        """Return names and data of a tenant's pins."""
        return [(pin.name, pin.data) for pin in self._pins.values() if pin.tenant == tenant]

    def expired(self) -> list[str]:
        """Return the names of pins whose time is over."""
        first = self._next_expiry()
        if first == math.inf or (now := self._clock()) < first:
            return []
        return [p.name for p in self._pins.values() if p.until_s is not None and p.until_s <= now]

    def pause_s(self) -> float | None:
        """Return the time until a pin expires, at most a minute, as clocks are set; None where none
        does."""
        first = self._next_expiry()
        return None if first == math.inf else min(max(first - self._clock(), 0.0), 60.0)

    def _next_expiry(self) -> float:
        if self._first_expiry is None:
            times = (pin.until_s for pin in self._pins.values() if pin.until_s is not None)
            self._first_expiry = min(times, default=math.inf)
        return self._first_expiry
