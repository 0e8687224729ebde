"""The values in Redis, byte by byte: see ../README.md. No I/O; any value that is read may be
garbage.

Every value ends with the xxh3_64 of all bytes before it. A value that does not verify, or is of
another version, of another server or out of its bounds, reads as None.
"""

from __future__ import annotations

import enum
import re
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Fingerprints = npt.NDArray[np.uint64]

__all__ = [
    "DELTA_PAGES",
    "FORGET_KEYS",
    "MAX_KEYS_BYTES",
    "MAX_PIECE_BYTES",
    "MAX_RECORD_BYTES",
    "PIECE_PAGES",
    "MAX_SERVING_BYTES",
    "Delta",
    "Forget",
    "Purge",
    "Role",
    "ServerRecord",
    "Serving",
    "fingerprints_of",
    "is_address",
    "is_serving",
    "pack_delta",
    "pack_forget",
    "pack_keys",
    "pack_piece",
    "pack_purge",
    "pack_record",
    "pack_serving",
    "piece_range",
    "unpack_delta",
    "unpack_forget",
    "unpack_keys",
    "unpack_piece",
    "unpack_purge",
    "unpack_record",
    "unpack_serving",
]

VERSION = 1
PIECE_PAGES = 65_536
"""Fingerprints in every piece of a snapshot except the last."""
DELTA_PAGES = 8_192
"""Bounds the fingerprints of a delta."""
FORGET_KEYS = 1_024
"""Bounds the keys of one forget; more are several."""

_CHECKSUM = struct.Struct("<Q")
_RECORD = struct.Struct("<8sII32s16sQQQQ16sH")
_PIECE = struct.Struct("<8sII16sQII")
_DELTA = struct.Struct("<8sII16sQII")
_PURGE = struct.Struct("<8sII16s16s")
_FORGET = struct.Struct("<8sII16s16s")
_KEYS = struct.Struct("<8sII16s")
_KEY_BYTES = 32
_SERVING = struct.Struct("<8sII16sIHH")
_SERVING_MAGIC = b"SGLTSRVS"
_RECORD_MAGIC, _PIECE_MAGIC = b"SGLTPEER", b"SGLTPGES"
_DELTA_MAGIC, _PURGE_MAGIC = b"SGLTDLTA", b"SGLTPURG"
_FORGET_MAGIC, _KEYS_MAGIC = b"SGLTFRGT", b"SGLTKEYS"
_EVERYONE = 1

_MAX_ADDRESS_BYTES = 255
MAX_RECORD_BYTES = _RECORD.size + _MAX_ADDRESS_BYTES + _CHECKSUM.size
MAX_SERVING_BYTES = _SERVING.size + _MAX_ADDRESS_BYTES + _CHECKSUM.size
MAX_PIECE_BYTES = _PIECE.size + 8 * PIECE_PAGES + _CHECKSUM.size
MAX_KEYS_BYTES = _KEYS.size + _KEY_BYTES * FORGET_KEYS + _CHECKSUM.size
_ADDRESS = re.compile(r"tcp://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%A-Za-z0-9]+\]):([0-9]{1,5})")


class ServerRecord(NamedTuple):
    """The sign of life of one server."""

    namespace: bytes
    server: str  # hex
    incarnation: int  # names its stream of changes
    sequence: int  # of its latest change
    snapshot: int  # the sequence number its snapshot is as of
    num_pages: int  # in that snapshot
    purges: bytes  # digest of the purges it applied
    address: str


class Role(enum.IntEnum):
    """What a server does of a request."""

    AGGREGATED = 0  # all of it
    PREFILL = 1
    DECODE = 2


class Serving(NamedTuple):
    """Where a server answers requests."""

    url: str  # http://host:port or https://host:port
    role: Role
    rank: int  # the data-parallel replica that the pages are of
    bootstrap_port: int = 0  # where decode finds a prefill server; 0 for other roles


class Delta(NamedTuple):
    """The pages of one change."""

    added: Fingerprints
    removed: Fingerprints


class Purge(NamedTuple):
    """Asks all servers to purge a tenant. ``tenant`` is None for all tenants."""

    number: bytes  # 16, at random
    tenant: bytes | None


class Forget(NamedTuple):
    """Asks all servers to forget pages. Their keys lie under a key of their own, by ``number``."""

    number: bytes  # 16, at random
    num_keys: int
    digest: bytes  # 16, of the keys


def fingerprints_of(keys: Sequence[bytes]) -> Fingerprints:
    """The first 8 bytes of each key of 32, little-endian."""
    return np.frombuffer(b"".join(keys), "<u8")[::4]


def is_address(text: str) -> bool:
    """Whether an address has the form ``tcp://host:port``, and not another one of ZeroMQ."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and len(text) <= _MAX_ADDRESS_BYTES and 0 < int(match[2]) < 65536


def _seal(body: bytes) -> bytes:
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def _verified(data: bytes | None, magic: bytes, layout: struct.Struct) -> tuple[Any, ...] | None:
    if data is None or len(data) < layout.size + _CHECKSUM.size:
        return None
    body = memoryview(data)[: -_CHECKSUM.size]
    if _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0] != xxhash.xxh3_64_intdigest(body):
        return None
    fields = layout.unpack_from(data)
    return fields if fields[0] == magic and fields[1] == VERSION else None


def pack_record(record: ServerRecord) -> bytes:
    address = record.address.encode("ascii")
    head = _RECORD.pack(
        _RECORD_MAGIC,
        VERSION,
        0,
        record.namespace,
        bytes.fromhex(record.server),
        record.incarnation,
        record.sequence,
        record.snapshot,
        record.num_pages,
        record.purges,
        len(address),
    )
    return _seal(head + address)


def unpack_record(data: bytes | None, namespace: bytes, server: str) -> ServerRecord | None:
    if data is None or len(data) > MAX_RECORD_BYTES:
        return None
    fields = _verified(data, _RECORD_MAGIC, _RECORD)
    if fields is None:
        return None
    *_, size = fields
    address = data[_RECORD.size : -_CHECKSUM.size].decode("ascii", errors="replace")
    incarnation, sequence, snapshot, num_pages, purges = fields[5:10]
    record = ServerRecord(
        fields[3], fields[4].hex(), incarnation, sequence, snapshot, num_pages, purges, address
    )
    fits = (
        len(address) == size
        and is_address(address)
        and record.namespace == namespace
        and record.server == server
        and 0 < record.snapshot <= record.sequence < 1 << 63
        and record.num_pages < 1 << 40
    )
    return record if fits else None


def is_serving(serving: Serving) -> bool:
    """Whether a value is within its bounds."""
    url, role, rank, port = serving
    scheme, _, rest = url.partition("://")
    return (
        scheme in ("http", "https")
        and is_address(f"tcp://{rest}")
        and len(url) <= _MAX_ADDRESS_BYTES
        and role in tuple(Role)
        and 0 <= rank < 1 << 32
        and 0 <= port < 65536
    )


def pack_serving(server: str, serving: Serving) -> bytes:
    url = serving.url.encode("ascii")
    head = _SERVING.pack(
        _SERVING_MAGIC,
        VERSION,
        serving.role,
        bytes.fromhex(server),
        serving.rank,
        serving.bootstrap_port,
        len(url),
    )
    return _seal(head + url)


def unpack_serving(data: bytes | None, server: str) -> Serving | None:
    if data is None or len(data) > MAX_SERVING_BYTES:
        return None
    fields = _verified(data, _SERVING_MAGIC, _SERVING)
    if fields is None or fields[3] != bytes.fromhex(server) or fields[2] not in tuple(Role):
        return None
    url = data[_SERVING.size : -_CHECKSUM.size].decode("ascii", errors="replace")
    serving = Serving(url, Role(fields[2]), fields[4], fields[5])
    return serving if len(url) == fields[6] and is_serving(serving) else None


def piece_range(piece: int, num_pages: int) -> tuple[int, int]:
    """First and last byte (inclusive) of a piece within a snapshot of so many pages."""
    stride = _PIECE.size + 8 * PIECE_PAGES + _CHECKSUM.size
    count = min(PIECE_PAGES, num_pages - piece * PIECE_PAGES)
    start = piece * stride
    return start, start + _PIECE.size + 8 * count + _CHECKSUM.size - 1


def pack_piece(server: str, sequence: int, piece: int, pages: Fingerprints) -> bytes:
    number = bytes.fromhex(server)
    head = _PIECE.pack(_PIECE_MAGIC, VERSION, 0, number, sequence, piece, len(pages))
    return _seal(head + pages.astype("<u8", copy=False).tobytes())


def unpack_piece(data: bytes | None, server: str, sequence: int, piece: int) -> Fingerprints | None:
    if data is None or len(data) > MAX_PIECE_BYTES:
        return None
    fields = _verified(data, _PIECE_MAGIC, _PIECE)
    if fields is None:
        return None
    if fields[3:6] != (bytes.fromhex(server), sequence, piece):
        return None
    pages = np.frombuffer(data, "<u8", offset=_PIECE.size, count=_words(data, _PIECE))
    return pages if len(pages) == fields[6] else None


def pack_delta(server: str, sequence: int, delta: Delta) -> bytes:
    number = bytes.fromhex(server)
    counts = len(delta.added), len(delta.removed)
    head = _DELTA.pack(_DELTA_MAGIC, VERSION, 0, number, sequence, *counts)
    pages = np.concatenate(delta).astype("<u8", copy=False)
    return _seal(head + pages.tobytes())


def unpack_delta(data: bytes | None, server: str, sequence: int) -> Delta | None:
    if data is None or len(data) > _DELTA.size + 8 * DELTA_PAGES + _CHECKSUM.size:
        return None
    fields = _verified(data, _DELTA_MAGIC, _DELTA)
    if fields is None:
        return None
    if fields[3:5] != (bytes.fromhex(server), sequence):
        return None
    num_added: int = fields[5]
    num_removed: int = fields[6]
    pages = np.frombuffer(data, "<u8", offset=_DELTA.size, count=_words(data, _DELTA))
    if len(pages) != num_added + num_removed:
        return None
    return Delta(pages[:num_added], pages[num_added:])


def _words(data: bytes, layout: struct.Struct) -> int:
    return (len(data) - layout.size - _CHECKSUM.size) // 8


def pack_purge(purge: Purge) -> bytes:
    flags = _EVERYONE if purge.tenant is None else 0
    tenant = bytes(16) if purge.tenant is None else purge.tenant
    return _seal(_PURGE.pack(_PURGE_MAGIC, VERSION, flags, purge.number, tenant))


def unpack_purge(data: bytes) -> Purge | None:
    if len(data) != _PURGE.size + _CHECKSUM.size:
        return None
    fields = _verified(data, _PURGE_MAGIC, _PURGE)
    if fields is None:
        return None
    tenant: bytes = fields[4]
    return Purge(fields[3], None if fields[2] == _EVERYONE else tenant)


def pack_forget(number: bytes, keys: Sequence[bytes]) -> bytes:
    return _seal(_FORGET.pack(_FORGET_MAGIC, VERSION, len(keys), number, _digest(b"".join(keys))))


def unpack_forget(data: bytes) -> Forget | None:
    if len(data) != _FORGET.size + _CHECKSUM.size:
        return None
    fields = _verified(data, _FORGET_MAGIC, _FORGET)
    if fields is None or not 0 < fields[2] <= FORGET_KEYS:
        return None
    return Forget(fields[3], fields[2], fields[4])


def pack_keys(number: bytes, keys: Sequence[bytes]) -> bytes:
    return _seal(_KEYS.pack(_KEYS_MAGIC, VERSION, len(keys), number) + b"".join(keys))


def unpack_keys(data: bytes | None, forget: Forget) -> list[bytes] | None:
    if data is None or len(data) != _KEYS.size + _KEY_BYTES * forget.num_keys + _CHECKSUM.size:
        return None
    fields = _verified(data, _KEYS_MAGIC, _KEYS)
    if fields is None or fields[2:] != (forget.num_keys, forget.number):
        return None
    keys = data[_KEYS.size : -_CHECKSUM.size]
    if _digest(keys) != forget.digest:
        return None
    return [keys[at : at + _KEY_BYTES] for at in range(0, len(keys), _KEY_BYTES)]


def _digest(keys: bytes) -> bytes:
    return xxhash.xxh3_128_digest(keys)
