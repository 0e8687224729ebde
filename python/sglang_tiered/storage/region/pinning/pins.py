"""A pin, and its file: a named set of pages that reclaim keeps. Pure, but for ``read_all``."""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from sglang_tiered.storage.base import (
    KEY_BYTES,
    TENANT_BYTES,
    PinInfo,
    PinRefusal,
    unique_keys,
)
from sglang_tiered.storage.region.files import TEMPORARY_SUFFIX, is_pin_name, pin_name
from sglang_tiered.storage.region.walk import NOT_A_FILE_ERRNOS, UNREADABLE_ERRNOS, persist

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_tiered.storage.region.device import Device

__all__ = [
    "MAX_DATA_BYTES",
    "MAX_PIN_BYTES",
    "MAX_NAME_BYTES",
    "FoundPins",
    "Pin",
    "PinInfo",
    "PinRefusal",
    "file_of",
    "pack",
    "read_all",
    "unpack",
]

MAX_NAME_BYTES = 1024
MAX_DATA_BYTES = 17 << 20  # four million tokens, and whose they are

VERSION = 1
MAGIC = b"SGLTPINS"
_HEADER = struct.Struct("<8sII16sdII")  # magic version num_keys tenant until name_bytes data_bytes
_CHECKSUM = struct.Struct("<Q")
_MAGIC_VERSION = struct.Struct("<8sI")
MAX_PIN_BYTES = 64 << 20


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
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def _verified(data: bytes) -> bytes | None:
    if len(data) < _HEADER.size + _CHECKSUM.size or not data.startswith(MAGIC):
        return None
    body = data[: -_CHECKSUM.size]
    matches = _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0] == xxhash.xxh3_64_intdigest(body)
    return body if matches else None


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


def read_all(device: Device, names: Iterable[str]) -> FoundPins:
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
