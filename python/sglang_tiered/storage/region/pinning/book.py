"""In memory: the pins of a store. No I/O, no locks: the owner's lock guards every call."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sglang_tiered.storage.region.pinning.pins import Pin

__all__ = ["MAX_KEYS", "MAX_PINS", "PinBook"]

MAX_PINS = 1 << 14
MAX_KEYS = 1 << 20  # of all pins together: about 130 bytes of memory each
MAX_NOTES_BYTES = 256 << 20  # of the notes of all pins, which lie in memory
_MAX_GONE = 64  # expiries of pins that are gone, beside one for each that is there


class PinBook:
    """Pins by name, and how many of them want each page. ``bound_bytes`` is what pages of pins may
    take together; with 0 nothing can be pinned. ``clock`` gives seconds since 1970."""

    def __init__(self, bound_bytes: int, clock: Callable[[], float]) -> None:
        self.bound_bytes = bound_bytes
        self.left_out: dict[bytes, None] = {}  # wanted pages that found no room within the bound
        self.data_bytes = 0
        self._clock = clock
        self._pins: dict[str, Pin] = {}
        self._holders: dict[bytes, Pin | tuple[Pin, ...]] = {}  # of a page
        self._expiries: list[tuple[float, str]] = []  # a heap, with those of pins that are gone
        self._due: dict[str, None] = {}  # whose time is over

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._pins.values()))

    @property
    def num_keys(self) -> int:
        return len(self._holders)

    def get(self, name: str) -> Pin | None:
        return self._pins.get(name)

    def add(self, pin: Pin) -> None:
        """Enter a pin whose name is not there."""
        assert pin.name not in self._pins, f"the pin {pin.name!r} is there twice"
        self._pins[pin.name] = pin
        self.data_bytes += len(pin.data)
        for key in pin.keys:
            holders = self._holders_of(key)
            self._holders[key] = (*holders, pin) if holders else pin
        if pin.until_s is not None:
            heapq.heappush(self._expiries, (pin.until_s, pin.name))

    def remove(self, name: str) -> list[bytes]:
        """Take a pin out, if it is there; returns the keys that no other wants."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return []
        self.data_bytes -= len(pin.data)
        self._due.pop(name, None)
        freed = []
        for key in pin.keys:
            left = tuple(each for each in self._holders_of(key) if each is not pin)
            if left:
                self._holders[key] = left if len(left) > 1 else left[0]
            else:
                del self._holders[key]
                freed.append(key)
        if len(self._expiries) > 2 * len(self._pins) + _MAX_GONE:
            times = ((each.until_s, each.name) for each in self._pins.values())
            self._expiries = [(until, name) for until, name in times if until is not None]
            heapq.heapify(self._expiries)
        return freed

    def _holders_of(self, key: bytes) -> tuple[Pin, ...]:
        found = self._holders.get(key, ())
        return found if isinstance(found, tuple) else (found,)

    def wanted(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return those keys that a pin wants."""
        return [key for key in keys if key in self._holders]

    def wanted_by(self, pin: Pin, *, but: Pin) -> list[bytes]:
        """Return the keys that no pin wants but one, which is there, and that another, which may
        take its place, does not want."""
        kept = set(but.keys)
        return [key for key in pin.keys if len(self._holders_of(key)) == 1 and key not in kept]

    def of_tenant(self, tenant: bytes | None) -> list[str]:
        """Return the names of a tenant's pins; of all for None."""
        return [pin.name for pin in self._pins.values() if tenant in (None, pin.tenant)]

    def with_any(self, keys: Iterable[bytes]) -> list[Pin]:
        """Return the pins that want any of these pages."""
        pins = (pin for key in keys for pin in self._holders_of(key))
        return list({pin.name: pin for pin in pins}.values())

    def notes_of(self, tenant: bytes) -> list[tuple[str, bytes]]:
        """Return names and data of a tenant's pins."""
        return [(pin.name, pin.data) for pin in self._pins.values() if pin.tenant == tenant]

    def expired(self) -> list[str]:
        """Return the names of pins whose time is over, in a time that grows with their number."""
        while self._next_expiry() <= self._clock():
            self._due[heapq.heappop(self._expiries)[1]] = None
        return list(self._due)

    def pause_s(self) -> float | None:
        """Return the time until a pin expires, at most a minute, as clocks are set; None where none
        does."""
        if self._due:
            return 0.0
        first = self._next_expiry()
        return None if first == math.inf else min(max(first - self._clock(), 0.0), 60.0)

    def _next_expiry(self) -> float:
        """Return when the next pin expires, and drop expiries of pins that are gone."""
        while self._expiries:
            until, name = self._expiries[0]
            pin = self._pins.get(name)
            if pin is not None and pin.until_s == until and name not in self._due:
                return until
            heapq.heappop(self._expiries)
        return math.inf
