"""The bytes in the bucket: constants, pack and unpack. Pure; see ``README.md`` for the grammar.

Unpacking never raises for bad bytes: what does not verify is ``None``, and the caller decides.
Tables of pages are numpy structured arrays, laid out as in the bucket.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from sglang_tiered.storage.base import KEY_BYTES, NO_TENANT
from sglang_tiered.storage.object.names import ID_BYTES, MAX_UNIX_MS, ObjectId, parse_id
from sglang_tiered.storage.region.format import NAMESPACE_BYTES, page_checksum

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    Buffer = bytes | bytearray | memoryview

__all__ = [
    "FORMAT_VERSION",
    "MAX_FORGOTTEN_PAGES",
    "MAX_MANIFEST_BYTES",
    "MAX_OBJECT_BYTES",
    "MAX_OBJECT_PAGES",
    "MAX_PURGE_BYTES",
    "NAMESPACE_BYTES",
    "NO_CODEC",
    "PAGE_DTYPE",
    "TAIL_BYTES",
    "Manifest",
    "Purge",
    "manifest_bytes",
    "num_forgotten",
    "other_version",
    "pack_manifest",
    "pack_purge",
    "pack_tail",
    "page_checksum",
    "page_table",
    "unpack_manifest",
    "unpack_purge",
    "unpack_tail",
]

FORMAT_VERSION = 1
FORGET_VERSION = 2  # of a purge that names pages
MAX_OBJECT_PAGES = 1 << 16
MAX_OBJECT_BYTES = 1 << 30  # of payload; offsets and lengths are 32 bits
NO_CODEC = "none"

MANIFEST_MAGIC = b"SGLTOMAN"
PURGE_MAGIC = b"SGLTOPRG"
TAIL_MAGIC = b"SGLTOEND"
_VERSIONS = {MANIFEST_MAGIC: (FORMAT_VERSION,), PURGE_MAGIC: (FORMAT_VERSION, FORGET_VERSION)}

# magic version num_pages namespace tenant codec id payload_bytes
_MANIFEST = struct.Struct("<8sII32s16s16s40sQ")
# magic version everyone (or num_pages) namespace tenant bound_ms
_PURGE = struct.Struct("<8sII32s16sQ")
_TAIL = struct.Struct("<Q8s")  # manifest_bytes magic
_CHECKSUM = struct.Struct("<Q")
_MAGIC_VERSION = struct.Struct("<8sI")

TAIL_BYTES = _TAIL.size

PAGE_DTYPE: np.dtype[Any] = np.dtype(
    [
        ("key", "V32"),
        ("offset", "<u4"),  # within the object
        ("stored", "<u4"),  # bytes in the object, encoded
        ("length", "<u4"),  # bytes of the page
        ("checksum", "<u8"),  # of namespace, key and stored bytes
    ]
)

MAX_FORGOTTEN_PAGES = 1 << 16  # that one purge names
MAX_PURGE_BYTES = _PURGE.size + MAX_FORGOTTEN_PAGES * KEY_BYTES + _CHECKSUM.size
MAX_MANIFEST_BYTES = _MANIFEST.size + MAX_OBJECT_PAGES * PAGE_DTYPE.itemsize + _CHECKSUM.size


class Manifest(NamedTuple):
    """What one object holds: pages of one tenant, under one namespace and codec."""

    object_id: ObjectId
    namespace: bytes
    tenant: bytes
    codec: str
    pages: npt.NDArray[Any]  # [pages] PAGE_DTYPE, in the order of their offsets
    payload_bytes: int

    @property
    def object_bytes(self) -> int:
        """Return the length of the whole object."""
        return self.payload_bytes + manifest_bytes(len(self.pages)) + TAIL_BYTES

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its pages, decoded."""
        return int(self.pages["length"].sum(dtype=np.int64))

    @property
    def page_bytes(self) -> int | None:
        """Return the length of every page, where all have the same; the rule under a codec."""
        lengths = self.pages["length"]
        return int(lengths[0]) if bool((lengths == lengths[0]).all()) else None


class Purge(NamedTuple):
    """Objects of the tenant (of everyone: None) that were opened up to ``bound_ms`` are dead; where
    it names pages, only these, in whatever object that was opened up to then."""

    namespace: bytes
    tenant: bytes | None
    bound_ms: int
    keys: tuple[bytes, ...] = ()


def manifest_bytes(num_pages: int) -> int:
    return _MANIFEST.size + num_pages * PAGE_DTYPE.itemsize + _CHECKSUM.size


def page_table(records: Iterable[tuple[bytes, int, int, int, int]]) -> npt.NDArray[Any]:
    """Return rows of key, offset, stored bytes, length and checksum as a table of PAGE_DTYPE."""
    return np.array(list(records), PAGE_DTYPE)


def _close(body: bytes) -> bytes:
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def _verifies(data: Buffer) -> bool:
    if len(data) < _MAGIC_VERSION.size + _CHECKSUM.size:
        return False
    view = memoryview(data)
    (stored,) = _CHECKSUM.unpack(view[-_CHECKSUM.size :])
    return bool(stored == xxhash.xxh3_64_intdigest(view[: -_CHECKSUM.size]))


def other_version(data: Buffer) -> int | None:
    """Return the version of a manifest or purge that verifies but is of another format.

    The place of magic, version and checksum is frozen for all versions, so a flipped bit in the
    version field is damage, not another format.
    """
    if not _verifies(data):
        return None
    magic, version = _MAGIC_VERSION.unpack_from(data)
    known = _VERSIONS.get(magic)
    return int(version) if known is not None and version not in known else None


def pack_manifest(manifest: Manifest) -> bytes:
    fields = _MANIFEST.pack(
        MANIFEST_MAGIC,
        FORMAT_VERSION,
        len(manifest.pages),
        manifest.namespace,
        manifest.tenant,
        manifest.codec.encode("ascii"),
        str(manifest.object_id).encode("ascii"),
        manifest.payload_bytes,
    )
    return _close(fields + manifest.pages.tobytes())


def unpack_manifest(data: Buffer) -> Manifest | None:
    """Unpack a manifest. The table is a copy: the caller may let go of the bytes."""
    if len(data) > MAX_MANIFEST_BYTES or len(data) < manifest_bytes(1) or not _verifies(data):
        return None
    magic, version, num_pages, namespace, tenant, codec, name, payload = _MANIFEST.unpack_from(data)
    if (magic, version) != (MANIFEST_MAGIC, FORMAT_VERSION):
        return None
    if len(data) != manifest_bytes(num_pages) or not 0 < payload <= MAX_OBJECT_BYTES:
        return None
    try:
        object_id = parse_id(name[:ID_BYTES].decode("ascii"))
        codec_name = codec.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError:
        return None
    if object_id is None or name[ID_BYTES:].strip(b"\0") or not codec_name:
        return None
    pages = np.frombuffer(data, PAGE_DTYPE, num_pages, _MANIFEST.size).copy()
    if not _is_sane(pages, payload, codec_name):
        return None
    return Manifest(object_id, namespace, tenant, codec_name, pages, payload)


def _is_sane(pages: npt.NDArray[Any], payload_bytes: int, codec: str) -> bool:
    """Return whether the pages follow each other within the payload."""
    offsets = pages["offset"].astype(np.int64)
    stored, lengths = pages["stored"].astype(np.int64), pages["length"]
    ends = offsets + stored
    if not ((stored > 0).all() and (lengths > 0).all()):
        return False
    if (offsets[1:] < ends[:-1]).any() or int(ends[-1]) > payload_bytes:
        return False
    # Without a codec bytes are as they are; with one, memory keeps one length for all pages.
    return bool((lengths == (stored if codec == NO_CODEC else lengths[0])).all())


def pack_tail(num_pages: int) -> bytes:
    """Return the end of an object. Before it is a copy of the manifest, so that an object tells by
    itself what it holds, and before that the payload."""
    return _TAIL.pack(manifest_bytes(num_pages), TAIL_MAGIC)


def unpack_tail(data: Buffer) -> int | None:
    """Return how many bytes before the tail the copy of the manifest begins; ``data`` ends with the
    tail."""
    if len(data) < TAIL_BYTES:
        return None
    nbytes, magic = _TAIL.unpack(memoryview(data)[-TAIL_BYTES:])
    known = magic == TAIL_MAGIC and manifest_bytes(1) <= nbytes <= MAX_MANIFEST_BYTES
    return int(nbytes) if known else None


def pack_purge(purge: Purge) -> bytes:
    version = FORGET_VERSION if purge.keys else FORMAT_VERSION
    number = len(purge.keys) or int(purge.tenant is None)
    tenant = NO_TENANT if purge.tenant is None else purge.tenant
    fields = _PURGE.pack(PURGE_MAGIC, version, number, purge.namespace, tenant, purge.bound_ms)
    return _close(fields + b"".join(purge.keys))


def num_forgotten(num_bytes: int) -> int:
    """Return how many pages a purge of that length names."""
    return max(num_bytes - _PURGE.size - _CHECKSUM.size, 0) // KEY_BYTES


def unpack_purge(data: Buffer) -> Purge | None:
    num_keys, odd = divmod(len(data) - _PURGE.size - _CHECKSUM.size, KEY_BYTES)
    if num_keys < 0 or odd or not _verifies(data):
        return None
    magic, version, number, namespace, tenant, bound_ms = _PURGE.unpack_from(data)
    if magic != PURGE_MAGIC or bound_ms > MAX_UNIX_MS:
        return None
    if version == FORMAT_VERSION and not num_keys and number <= 1:
        return Purge(namespace, None if number else tenant, bound_ms)
    if version != FORGET_VERSION or number != num_keys or tenant != NO_TENANT or not num_keys:
        return None
    ends = range(_PURGE.size, len(data) - _CHECKSUM.size, KEY_BYTES)
    return Purge(namespace, None, bound_ms, tuple(bytes(data[at : at + KEY_BYTES]) for at in ends))
