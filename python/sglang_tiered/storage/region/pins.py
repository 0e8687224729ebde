"""Pins, named sets of pages that reclaim keeps: their files, and the book of those of a store.
Pure, but for ``read_all``; the owner's lock guards every call of the book."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.storage.base import (
    KEY_BYTES,
    TENANT_BYTES,
    PinRefusal,
    unique_keys,
)
from sglang_tiered.storage.region.format import (
    CHECKSUM_BYTES,
    TEMPORARY_SUFFIX,
    is_pin_name,
    pin_name,
    verifies,
    with_checksum,
)
from sglang_tiered.storage.region.walk import NOT_A_FILE_ERRNOS, UNREADABLE_ERRNOS, persist

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from sglang_tiered.storage.region.device import FileReader


MAX_NAME_BYTES = 1024
MAX_DATA_BYTES = 17 << 20  # four million tokens, and whose they are

VERSION = 1
MAGIC = b"SGLTPINS"
_HEADER = struct.Struct("<8sII16sdII")  # magic version num_keys tenant until name_bytes data_bytes
_MAGIC_VERSION = struct.Struct("<8sI")
MAX_PIN_BYTES = 64 << 20
MAX_PINS = 1 << 14
MAX_KEYS = 1 << 20  # of all pins together: about 130 bytes of memory each
MAX_NOTES_BYTES = 256 << 20  # of the notes of all pins, which lie in memory


@dataclass(frozen=True, slots=True)
class Pin:
    """Pages to keep until then, in seconds since 1970; ``data`` is the caller's own note."""

    name: str
    tenant: bytes
    keys: tuple[bytes, ...]
    until_s: float | None = None
    data: bytes = b""

    @classmethod
    def checked(
        cls, name: str, keys: Iterable[bytes], tenant: bytes, until_s: float | None, data: bytes
    ) -> Pin:
        """Make a pin. Raises ``ValueError`` for what no pin can be."""
        unique = unique_keys(keys)
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            raise ValueError(f"the name of a pin has 1 to {MAX_NAME_BYTES} bytes, not {name!r:.40}")
        if not unique:
            raise ValueError(f"the pin {name!r} names no page; unpin it instead")
        if len(tenant) != TENANT_BYTES:
            raise ValueError(f"a tenant has {len(tenant)} bytes, expected {TENANT_BYTES}")
        if until_s is not None and not math.isfinite(until_s):
            raise ValueError(f"a pin until {until_s}: must be seconds since 1970, or None")
        if len(data) > MAX_DATA_BYTES:
            raise ValueError(f"the data of a pin has {len(data)} bytes, at most {MAX_DATA_BYTES}")
        return cls(name, tenant, unique, until_s, bytes(data))


def file_of(name: str) -> str:
    """Return the file of the pin of that name, which may hold any character."""
    return pin_name(hashlib.blake2b(name.encode(), digest_size=16).hexdigest())


def pack(pin: Pin) -> bytes:
    name = pin.name.encode()
    until = math.inf if pin.until_s is None else pin.until_s
    fields = _HEADER.pack(
        MAGIC, VERSION, len(pin.keys), pin.tenant, until, len(name), len(pin.data)
    )
    body = b"".join((fields, name, pin.data, *pin.keys))
    return with_checksum(body, len(body) + CHECKSUM_BYTES)


def _verified(data: bytes) -> bytes | None:
    is_whole = len(data) >= _HEADER.size + CHECKSUM_BYTES and verifies(data)
    return data[:-CHECKSUM_BYTES] if is_whole and data.startswith(MAGIC) else None


def unpack(data: bytes) -> Pin | None:
    """Unpack a pin; ``None`` for bytes that do not verify or are of another version."""
    body = _verified(data)
    if body is None or _MAGIC_VERSION.unpack_from(body)[1] != VERSION:
        return None
    _, _, num_keys, tenant, until, name_bytes, data_bytes = _HEADER.unpack_from(body)
    start = _HEADER.size + name_bytes + data_bytes
    if len(body) != start + num_keys * KEY_BYTES:
        return None
    keys = [body[at : at + KEY_BYTES] for at in range(start, len(body), KEY_BYTES)]
    try:
        name = body[_HEADER.size : _HEADER.size + name_bytes].decode()
        note = body[_HEADER.size + name_bytes : start]
        return Pin.checked(name, keys, tenant, None if until == math.inf else until, note)
    except ValueError:
        return None


class FoundPins(NamedTuple):
    """The pins of a store, and the names of files that are none."""

    pins: list[Pin]
    damaged: list[str]
    newer: list[str]  # that verify, but are of a later version: left alone
    unfinished: list[str]
    unread: list[str]  # that cannot be read: left alone


def read_all(device: FileReader, names: Iterable[str]) -> FoundPins:
    """Read the pins among files of these names. Raises ``OSError`` for conditions of this
    process."""
    found = FoundPins([], [], [], [], [])
    for name in sorted(names):
        if name.endswith(TEMPORARY_SUFFIX) and is_pin_name(name.removesuffix(TEMPORARY_SUFFIX)):
            found.unfinished.append(name)
        if not is_pin_name(name):
            continue
        try:
            data = persist(functools.partial(device.read_file, name))
        except FileNotFoundError:
            continue  # unpinned, beside a tool that looks
        except OSError as error:
            if error.errno in UNREADABLE_ERRNOS:
                found.unread.append(name)
                continue
            if error.errno not in NOT_A_FILE_ERRNOS:
                raise
            data = b""
        pin, body = unpack(data), _verified(data)
        if pin is not None and file_of(pin.name) == name:
            found.pins.append(pin)
        elif body is not None and _MAGIC_VERSION.unpack_from(body)[1] > VERSION:
            found.newer.append(name)
        else:
            found.damaged.append(name)
    return found


class PinBook:
    """Pins by name, and how many of them want each page. ``bound_bytes`` is what pages of pins may
    take together; with 0 nothing can be pinned. ``clock`` gives seconds since 1970."""

    def __init__(self, bound_bytes: int, clock: Callable[[], float]) -> None:
        self.bound_bytes = bound_bytes
        self.left_out: dict[bytes, None] = {}  # wanted pages that found no room within the bound
        self.data_bytes = 0
        self._clock = clock
        self._pins: dict[str, Pin] = {}
        self._holders: dict[bytes, str | set[str]] = {}  # of a page: one name, or several
        self._next_expiry_s: float | None = math.inf  # None: to be looked for

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
            holders = self._holders.setdefault(key, pin.name)
            if isinstance(holders, set):
                holders.add(pin.name)
            elif holders != pin.name:
                self._holders[key] = {holders, pin.name}
        self._next_expiry_s = None

    def remove(self, name: str) -> list[bytes]:
        """Take a pin out, if it is there; returns the keys that no other wants."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return []
        self.data_bytes -= len(pin.data)
        freed = []
        for key in pin.keys:
            holders = self._holders[key]
            if isinstance(holders, set):
                holders.remove(name)
                if len(holders) == 1:
                    self._holders[key] = holders.pop()
            else:
                del self._holders[key]
                freed.append(key)
        self._next_expiry_s = None
        return freed

    def forget(self, keys: Collection[bytes]) -> list[str]:
        """Take pages out of all pins, with the data of those pins, which may tell what was there;
        returns their names. A pin of which none is left goes."""
        gone = self._holders.keys() & keys
        changed = self.with_any(gone)
        for pin in changed:
            left = tuple(key for key in pin.keys if key not in gone)
            if not left:
                self.remove(pin.name)
                continue
            self._pins[pin.name] = replace(pin, keys=left, data=b"")
            self.data_bytes -= len(pin.data)
        for key in gone:
            self._holders.pop(key, None)
            self.left_out.pop(key, None)
        return [pin.name for pin in changed]

    def wanted(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return those keys that a pin wants."""
        return [key for key in keys if key in self._holders]

    def unwanted(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return those keys that no pin wants."""
        return [key for key in keys if key not in self._holders]

    def freed_by(self, pin: Pin) -> list[bytes]:
        """Return the keys that no pin wants once this one is in the place of one of its name."""
        before = self._pins.get(pin.name)
        if before is None:
            return []
        kept = set(pin.keys)
        return [key for key in before.keys if self._holders[key] == pin.name and key not in kept]

    def refusal(
        self,
        pin: Pin,
        freed: Sequence[bytes],
        asked_bytes: int,
        pinned_bytes: int,
        *,
        max_pins: int,
        max_keys: int,
    ) -> PinRefusal | None:
        """Return why a pin cannot take the place of one of its name, which frees those keys: its
        pages add so many bytes to those of the others."""
        before, bound = self._pins.get(pin.name), self.bound_bytes
        num_keys = self.num_keys - len(freed) + len(self.unwanted(pin.keys))
        data_bytes = self.data_bytes - (len(before.data) if before else 0) + len(pin.data)
        if pinned_bytes + asked_bytes > bound:
            numbers = f"{asked_bytes} bytes cannot be pinned beside {pinned_bytes}"
            why = f"pages of {numbers}: at most {bound}"
        elif before is None and len(self) >= max_pins:
            why = f"there are {max_pins} pins already: unpin some"
        elif num_keys > max_keys:
            why = f"pins would name {num_keys} pages, at most {max_keys}: unpin some"
        elif data_bytes > MAX_NOTES_BYTES:
            why = f"pins would note {data_bytes} bytes, at most {MAX_NOTES_BYTES}: unpin some"
        else:
            return None
        return PinRefusal(asked_bytes, pinned_bytes, bound, why)

    def of_tenant(self, tenant: bytes | None) -> list[str]:
        """Return the names of a tenant's pins; of all for None."""
        return [pin.name for pin in self._pins.values() if tenant in (None, pin.tenant)]

    def with_any(self, keys: Iterable[bytes]) -> list[Pin]:
        """Return the pins that want any of these pages."""
        found = (self._holders.get(key, ()) for key in keys)
        sets = ((each,) if isinstance(each, str) else each for each in found)
        return [self._pins[name] for name in dict.fromkeys(itertools.chain.from_iterable(sets))]

    def notes_of(self, tenant: bytes) -> list[tuple[str, bytes]]:
        """Return names and data of a tenant's pins."""
        return [(pin.name, pin.data) for pin in self._pins.values() if pin.tenant == tenant]

    def expired(self, most: int = MAX_PINS) -> list[str]:
        """Return the names of pins whose time is over, so many at most: they must be removed."""
        now_s = self._clock()
        if self._next_expiry() > now_s:
            return []
        times = ((pin.name, pin.until_s) for pin in self._pins.values())
        return [name for name, until in times if until is not None and until <= now_s][:most]

    def pause_s(self) -> float | None:
        """Return the time until a pin expires, at most a minute, as clocks are set; None where none
        does."""
        first = self._next_expiry()
        return None if first == math.inf else min(max(first - self._clock(), 0.0), 60.0)

    def _next_expiry(self) -> float:
        """Return when the next pin expires: looked for once after each change, among the few
        thousand that there may be."""
        if self._next_expiry_s is None:
            times = (pin.until_s for pin in self._pins.values())
            self._next_expiry_s = min((t for t in times if t is not None), default=math.inf)
        return self._next_expiry_s
