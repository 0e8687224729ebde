"""The bytes on disk: constants, pack and unpack. Pure; see ``README.md`` for the grammar.

Unpacking never raises for bad bytes: what does not verify is ``None``, and the caller decides.
Tables of pages are numpy structured arrays, laid out as on disk: a store of a million pages is
opened and indexed without a Python object for each.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from sglang_tiered.errors import StoreFormatError
from sglang_tiered.storage.base import NO_TENANT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    Buffer = bytes | bytearray | memoryview


FORMAT_VERSION = 3
BLOCK_BYTES = 4096
CHECKSUM_BYTES = 8
NONCE_BYTES = 16
NAMESPACE_BYTES = 32
MAX_EXTENT_PAGES = 512

REGION_MAGIC = b"SGLTREGN"
EXTENT_MAGIC = b"SGLTEXTN"
FOOTER_MAGIC = b"SGLTFOOT"
TRAILER_MAGIC = b"SGLTTRLR"

_REGION = struct.Struct("<8sIIQQ16sQ")  # magic version block_bytes nbytes sequence nonce created
_EXTENT = struct.Struct("<8sII16sII32s16sQ")  # magic version header_bytes nonce ordinal pages ...
_FOOTER = struct.Struct("<8sII16sQQ")  # magic version num_extents nonce num_pages footer_bytes
_TRAILER = struct.Struct("<8sII16sQQ")  # magic version num_extents nonce footer_offset footer_bytes
_CHECKSUM = struct.Struct("<Q")
_MAGIC_VERSION = struct.Struct("<8sI")

PAGE_DTYPE: np.dtype[Any] = np.dtype(
    [("key", "V32"), ("length", "<u4"), ("checksum", "<u8")]  # length without padding
)
EXTENT_DTYPE: np.dtype[Any] = np.dtype(
    [  # offset within the region
        ("offset", "<u8"),
        ("num_pages", "<u4"),
        ("namespace", "V32"),
        ("tenant", "V16"),
    ]
)

# ---- Names ----

# Every name that a file of the product can have in a tier directory; no other list of them exists.
# The code that recognizes a tier directory, looks into a shard or removes one goes by it. A name
# that is missing here keeps a store without its manifest from being opened, and its shard from
# being removed.

# Of the tier directory.
MANIFEST_NAME = "STORE"
WEIGHTS_NAME = "WEIGHTS"
SHARD_PREFIX = "shard-"
LOCK_NAME = "LOCK"  # of a shard too

# Of a shard, beside its regions.
ERASED_NAME = "ERASED"
PIN_PREFIX = "PIN-"  # one file for each pin
PROBE_NAME = "PROBE"
LENDING_NAME = "LENDING"  # a socket of the process that has the shard open
NAMESPACE_NAME = "NAMESPACE"
PAGE_SIZES_NAME = "PAGE-SIZES"
TEMPORARY_SUFFIX = ".tmp"

NOTE_NAMES = (NAMESPACE_NAME, PAGE_SIZES_NAME)
EARLIER_NAMES = frozenset({"CHECKPOINT", "CHECKPOINT.tmp"})
"""Of files that the program wrote before: a start removes them."""
LEFTOVER_NAMES = frozenset(
    {
        PROBE_NAME,
        LENDING_NAME,
        *(n + TEMPORARY_SUFFIX for n in (ERASED_NAME, *NOTE_NAMES)),
        *EARLIER_NAMES,
    }
)
"""Gone from a shard that is closed, unless the process that had it open died in it."""
IGNORED_NAMES = frozenset({"lost+found"})
"""The kernel's, not a user's data: a filesystem that is mounted here holds it."""

_SHARD = re.compile(rf"{SHARD_PREFIX}[A-Za-z0-9._-]+")
_PIN = re.compile(rf"{PIN_PREFIX}[0-9a-f]{{32}}")
_TIER_NAMES = frozenset({MANIFEST_NAME, WEIGHTS_NAME, LOCK_NAME})
_TIER_TEMPORARY = re.compile(rf"({MANIFEST_NAME}|{WEIGHTS_NAME})\.tmp-\d+")
_SHARD_NAMES = LEFTOVER_NAMES | {LOCK_NAME, ERASED_NAME, *NOTE_NAMES}
# Sequence numbers stay below 2**63, so the one after the largest name still has a name.
_NAME = re.compile(r"region-([0-7][0-9a-f]{15})\.kv")


def region_name(sequence: int) -> str:
    return f"region-{sequence:016x}.kv"


def parse_region_name(name: str) -> int | None:
    """Return the sequence number in a region's file name; ``None`` for a foreign name."""
    match = _NAME.fullmatch(name)
    return int(match[1], 16) if match else None


def is_shard_name(name: str) -> bool:
    """Return whether a directory of that name in a tier directory is a shard."""
    return _SHARD.fullmatch(name) is not None


def is_tier_file(name: str) -> bool:
    """Return whether a file of that name in a tier directory is the product's."""
    return name in _TIER_NAMES or is_tier_temporary(name)


def is_tier_temporary(name: str) -> bool:
    """Return whether a process writes a file of a tier directory under that name."""
    return _TIER_TEMPORARY.fullmatch(name) is not None


def is_shard_file(name: str) -> bool:
    """Return whether a file of that name in a shard is the product's, regions included."""
    is_listed = name in _SHARD_NAMES or is_pin_name(name.removesuffix(TEMPORARY_SUFFIX))
    return is_listed or parse_region_name(name) is not None


def pin_name(digest: str) -> str:
    """Return the name of the file of a pin, whose own name has that digest: 32 hex digits."""
    return f"{PIN_PREFIX}{digest}"


def is_pin_name(name: str) -> bool:
    return _PIN.fullmatch(name) is not None


class RegionHeader(NamedTuple):
    nbytes: int
    sequence: int
    nonce: bytes
    created_ns: int


class Extent(NamedTuple):
    """Pages of one tenant written together, at ``offset`` within their region."""

    offset: int
    namespace: bytes
    pages: npt.NDArray[Any]  # [pages] PAGE_DTYPE
    tenant: bytes = NO_TENANT

    @property
    def identity(self) -> tuple[bytes, ...]:
        """Return whose pages these are, and which."""
        return self.namespace, self.tenant, self.pages.tobytes()

    @property
    def end(self) -> int:
        return self.offset + extent_header_bytes(len(self.pages)) + self.payload_bytes

    @property
    def payload_bytes(self) -> int:
        return int(_padded_lengths(self.pages).sum())

    def page_offsets(self) -> npt.NDArray[np.int64]:
        """Return where the bytes of each page are within the region."""
        lengths = _padded_lengths(self.pages)
        ends: npt.NDArray[np.int64] = np.cumsum(lengths)
        return ends - lengths + (self.offset + extent_header_bytes(len(self.pages)))


class Contents(NamedTuple):
    """All extents of a region, as its footer lists them."""

    extents: npt.NDArray[Any]  # [extents] EXTENT_DTYPE
    pages: npt.NDArray[Any]  # [pages of all extents, in order] PAGE_DTYPE

    @classmethod
    def of(cls, extents: Sequence[Extent]) -> Contents:
        table = np.zeros(len(extents), EXTENT_DTYPE)
        for row, extent in zip(table, extents, strict=True):
            row["offset"], row["num_pages"] = extent.offset, len(extent.pages)
            row["namespace"] = np.void(extent.namespace)
            row["tenant"] = np.void(extent.tenant)
        pages = [extent.pages for extent in extents]
        return cls(table, np.concatenate(pages) if pages else np.zeros(0, PAGE_DTYPE))

    def each(self) -> Iterator[Extent]:
        """Yield the extents."""
        start = 0
        for offset, num_pages, namespace, tenant in self.extents:
            stop = start + int(num_pages)
            names = namespace.tobytes(), tenant.tobytes()
            yield Extent(int(offset), names[0], self.pages[start:stop], names[1])
            start = stop

    def payload_bytes(self) -> npt.NDArray[np.int64]:
        """Return the payload of each extent, padding included."""
        ends = np.cumsum(self.extents["num_pages"].astype(np.int64))
        total = np.concatenate([[0], np.cumsum(_padded_lengths(self.pages))])
        return np.diff(total[np.concatenate([[0], ends])])

    def page_offsets(self) -> npt.NDArray[np.int64]:
        """Return where the bytes of each page are within the region."""
        num_pages = self.extents["num_pages"].astype(np.int64)
        lengths = _padded_lengths(self.pages)
        before = np.cumsum(lengths) - lengths
        first_page = np.cumsum(num_pages) - num_pages
        payload = self._payload_offsets()
        shift: npt.NDArray[np.int64] = np.repeat(payload - before[first_page], num_pages)
        return before + shift

    def ends(self) -> npt.NDArray[np.int64]:
        """Return where each extent ends."""
        return self._payload_offsets() + self.payload_bytes()

    @property
    def end(self) -> int:
        """Return where the last extent ends; without one, where the first will begin."""
        if not len(self.extents):
            return BLOCK_BYTES
        offset, number = (int(self.extents[-1][name]) for name in ("offset", "num_pages"))
        return Extent(offset, b"", self.pages[len(self.pages) - number :]).end

    def _payload_offsets(self) -> npt.NDArray[np.int64]:
        num_pages = self.extents["num_pages"].astype(np.int64)
        fixed = _EXTENT.size + CHECKSUM_BYTES
        headers = -(-(fixed + num_pages * PAGE_DTYPE.itemsize) // BLOCK_BYTES) * BLOCK_BYTES
        offsets: npt.NDArray[np.int64] = self.extents["offset"].astype(np.int64) + headers
        return offsets

    def of_namespace(self, namespace: bytes) -> npt.NDArray[np.bool_]:
        """Return which extents were stored under the namespace."""
        wanted = np.frombuffer(namespace, np.uint8)
        stored = np.ascontiguousarray(self.extents["namespace"]).view(np.uint8).reshape(-1, 32)
        matching: npt.NDArray[np.bool_] = (stored == wanted).all(axis=1)
        return matching


def padded(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def _padded_lengths(pages: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    lengths: npt.NDArray[np.int64] = pages["length"].astype(np.int64)
    blocks: npt.NDArray[np.int64] = -(-lengths // BLOCK_BYTES)
    return blocks * BLOCK_BYTES


def page_table(records: Iterable[tuple[bytes, int, int]]) -> npt.NDArray[Any]:
    """Return rows of key, length and checksum as a table of PAGE_DTYPE."""
    return np.array(list(records), PAGE_DTYPE)


def extent_header_bytes(num_pages: int) -> int:
    return padded(_EXTENT.size + num_pages * PAGE_DTYPE.itemsize + CHECKSUM_BYTES)


def footer_bytes(num_extents: int, num_pages: int) -> int:
    tables = num_extents * EXTENT_DTYPE.itemsize + num_pages * PAGE_DTYPE.itemsize
    return padded(_FOOTER.size + tables + CHECKSUM_BYTES)


def fits_region(region_bytes: int, end: int, num_extents: int, num_pages: int) -> bool:
    """Return whether a region whose last extent stops at ``end`` still has room for its footer and
    trailer, with so many extents and pages in all."""
    return end + footer_bytes(num_extents, num_pages) + BLOCK_BYTES <= region_bytes


def max_page_bytes(region_bytes: int) -> int:
    """Return the largest page a region can hold: header, footer and trailer must fit beside it."""
    return region_bytes - 2 * BLOCK_BYTES - extent_header_bytes(1) - footer_bytes(1, 1)


def min_region_bytes(page_bytes: int) -> int:
    """Return the smallest region that can hold a page."""
    nbytes = padded(page_bytes) - max_page_bytes(0)
    return max(nbytes, MIN_REGION_BYTES)


MAX_EXTENT_HEADER_BYTES = extent_header_bytes(MAX_EXTENT_PAGES)
MIN_REGION_BYTES = 8 * BLOCK_BYTES
MAX_REGION_BYTES = 1 << 40


def with_checksum(fields: bytes, nbytes: int) -> bytes:
    """Zero-pad to ``nbytes`` with the checksum of all before it in the last eight bytes."""
    body = fields.ljust(nbytes - CHECKSUM_BYTES, b"\0")
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def verifies(block: Buffer) -> bool:
    view = memoryview(block)
    (stored,) = _CHECKSUM.unpack(view[-CHECKSUM_BYTES:])
    return bool(stored == xxhash.xxh3_64_intdigest(view[:-CHECKSUM_BYTES]))


def _packed(
    layout: struct.Struct, magic: bytes, nbytes: int, *fields: Any, tables: bytes = b""
) -> bytes:
    return with_checksum(layout.pack(magic, FORMAT_VERSION, *fields) + tables, nbytes)


def _fields(layout: struct.Struct, magic: bytes, data: Buffer) -> tuple[Any, ...] | None:
    """Return what stands behind magic and version in data that verifies and begins with these."""
    if len(data) < layout.size + CHECKSUM_BYTES or not verifies(data):
        return None
    found, version, *fields = layout.unpack_from(data)
    return tuple(fields) if (found, version) == (magic, FORMAT_VERSION) else None


def newer_format(name: object, version: int, known: int) -> StoreFormatError:
    """Return what to raise for a file that a newer program wrote."""
    return StoreFormatError(
        f"{name} was written in format {version}, newer than {known}, which this version reads; "
        "upgrade sglang-tiered or pass another --tier-dir"
    )


def other_version(block: Buffer) -> int | None:
    """Return the version of a region header that verifies but is of another format.

    The place of magic, version and checksum in block 0 is frozen for all versions, so a flipped
    bit in the version field is damage, not another format.
    """
    if len(block) != BLOCK_BYTES or not verifies(block):
        return None
    magic, version = _MAGIC_VERSION.unpack_from(block)
    return int(version) if magic == REGION_MAGIC and version != FORMAT_VERSION else None


def pack_region_header(header: RegionHeader) -> bytes:
    return _packed(_REGION, REGION_MAGIC, BLOCK_BYTES, BLOCK_BYTES, *header)


def unpack_region_header(block: Buffer) -> RegionHeader | None:
    fields = _fields(_REGION, REGION_MAGIC, block) if len(block) == BLOCK_BYTES else None
    if fields is None or fields[0] != BLOCK_BYTES:
        return None
    header = RegionHeader(*fields[1:])
    is_sane = MIN_REGION_BYTES <= header.nbytes <= MAX_REGION_BYTES
    return header if is_sane and header.nbytes % BLOCK_BYTES == 0 else None


def pack_extent_header(extent: Extent, nonce: bytes, ordinal: int) -> bytes:
    num_pages = len(extent.pages)
    nbytes = extent_header_bytes(num_pages)
    whose = extent.namespace, extent.tenant, extent.payload_bytes
    fields = nbytes, nonce, ordinal, num_pages, *whose
    return _packed(_EXTENT, EXTENT_MAGIC, nbytes, *fields, tables=extent.pages.tobytes())


def peek_extent_header_bytes(block: Buffer) -> int | None:
    """Return how long the extent header starting with this block says it is; not yet verified."""
    magic, version, header_bytes = struct.unpack_from("<8sII", block)
    if (magic, version) != (EXTENT_MAGIC, FORMAT_VERSION):
        return None
    if header_bytes % BLOCK_BYTES or not 0 < header_bytes <= MAX_EXTENT_HEADER_BYTES:
        return None
    return int(header_bytes)


def unpack_extent_header(header: Buffer, offset: int, nonce: bytes, ordinal: int) -> Extent | None:
    """Return the extent at ``offset`` if its header verifies and was written there."""
    fields = _fields(_EXTENT, EXTENT_MAGIC, header)
    if fields is None or fields[:3] != (len(header), nonce, ordinal):
        return None
    num_pages, namespace, tenant, payload = fields[3:]
    if num_pages == 0 or len(header) != extent_header_bytes(num_pages):
        return None
    pages = np.frombuffer(header, PAGE_DTYPE, num_pages, _EXTENT.size).copy()
    extent = Extent(offset, namespace, pages, tenant)
    return extent if extent.payload_bytes == payload else None


def pack_footer(contents: Contents, nonce: bytes) -> bytes:
    num_extents, num_pages = len(contents.extents), len(contents.pages)
    nbytes = footer_bytes(num_extents, num_pages)
    tables = contents.extents.tobytes() + contents.pages.tobytes()
    fields = num_extents, nonce, num_pages, nbytes
    return _packed(_FOOTER, FOOTER_MAGIC, nbytes, *fields, tables=tables)


def unpack_footer(footer: Buffer, nonce: bytes) -> Contents | None:
    """Unpack a footer. The tables are copies: the caller may reuse the buffer."""
    fields = _fields(_FOOTER, FOOTER_MAGIC, footer)
    if fields is None:
        return None
    num_extents, found_nonce, num_pages, nbytes = fields
    if found_nonce != nonce or not nbytes == len(footer) == footer_bytes(num_extents, num_pages):
        return None
    extents = np.frombuffer(footer, EXTENT_DTYPE, num_extents, _FOOTER.size).copy()
    start = _FOOTER.size + extents.nbytes
    pages = np.frombuffer(footer, PAGE_DTYPE, num_pages, start).copy()
    offsets = extents["offset"]
    sane = (extents["num_pages"] > 0) & (offsets % BLOCK_BYTES == 0) & (offsets < MAX_REGION_BYTES)
    if not sane.all() or extents["num_pages"].sum() != num_pages:
        return None
    return Contents(extents, pages)


def pack_trailer(nonce: bytes, num_extents: int, footer_offset: int, footer_bytes: int) -> bytes:
    place = footer_offset, footer_bytes
    return _packed(_TRAILER, TRAILER_MAGIC, BLOCK_BYTES, num_extents, nonce, *place)


def unpack_trailer(block: Buffer, nonce: bytes, region_bytes: int) -> tuple[int, int, int] | None:
    """Return how many extents the footer lists, where it is and how long."""
    fields = _fields(_TRAILER, TRAILER_MAGIC, block)
    if fields is None or fields[1] != nonce:
        return None
    num_extents, _, offset, nbytes = fields
    if nbytes == 0 or nbytes % BLOCK_BYTES or offset + nbytes + BLOCK_BYTES != region_bytes:
        return None
    return num_extents, offset, nbytes
