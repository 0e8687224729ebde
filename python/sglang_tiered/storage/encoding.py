"""``PageEncoding``: how pages are kept below host memory.

A page is encoded on its way into NVMe. From there on its stored bytes travel as they stand: to the
bucket, and into another region. They are decoded where a load delivers them, one for another server
too; what comes from there into this NVMe is encoded anew. So no record says how a page is stored:
one of fewer bytes than a load asks for is encoded, and its own header says of how many. Checksums
are of the stored bytes, and verified first.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sglang_tiered.codecs import NO_CODEC, make_codec
from sglang_tiered.codecs.encoded import (
    METHOD_FP8,
    METHOD_INT8,
    MIN_SAVED_SHARE,
    PageCodec,
    plain_page,
    unpack_header,
)
from sglang_tiered.errors import CodecError
from sglang_tiered.storage.base import Reason, Tier
from sglang_tiered.storage.region.format import padded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sglang_tiered.codecs import PageLayout
    from sglang_tiered.storage.base import Page


logger = logging.getLogger(__name__)

_SAMPLED_PAGES = 64
"""While a codec is off one page in so many is encoded, or nothing would tell when it pays again."""

_MARGIN = 1.25
"""What is off comes on again when it saves so many times what it costs."""

_LONG_BYTES = 1 << 20
"""A read or write of pages that take less in memory takes about as long whatever its length, so
fewer bytes of it save nothing. In memory: or pages near it would count until they are encoded."""

_LOSSY_METHODS = {METHOD_FP8: "fp8", METHOD_INT8: "int8"}

_EVIDENCE_BYTES = 64 << 20
_MEMORY_BYTES = 1 << 30
"""Before so many bytes nothing is concluded; after so many the older half counts half as much."""


@dataclass(slots=True)
class EncodingStats:
    """Counters since the start. Seconds are those of the threads that did it."""

    is_on: bool
    num_encoded: int = 0  # pages
    encoded_page_bytes: int = 0  # of those, before
    encoded_bytes: int = 0  # of those, as stored
    encode_s: float = 0.0  # of all that were tried
    num_decoded: int = 0
    decoded_page_bytes: int = 0
    decode_s: float = 0.0


@dataclass(slots=True)
class _Pace:
    """How much a byte takes, mostly of late."""

    amount: float = 0.0
    num_bytes: int = 0

    def note(self, amount: float, num_bytes: int) -> None:
        if self.num_bytes > _MEMORY_BYTES:
            self.amount, self.num_bytes = self.amount / 2, self.num_bytes // 2
        self.amount += amount
        self.num_bytes += num_bytes

    @property
    def is_known(self) -> bool:
        return self.num_bytes >= _EVIDENCE_BYTES

    @property
    def per_byte(self) -> float:
        return self.amount / max(1, self.num_bytes)


def _encoded_from(stored: memoryview) -> int:
    """Return the length of the page that these bytes, or more, are the encoding of; 0 where they
    are none."""
    try:
        return unpack_header(stored).page_bytes
    except CodecError:
        return 0


def page_alone(stored: memoryview) -> tuple[memoryview, str | None]:
    """Return a page by its stored bytes alone, and the lossy codec that it is still encoded by,
    which takes the layout."""
    if _encoded_from(stored) <= stored.nbytes:
        return stored, None
    lossy = _LOSSY_METHODS.get(unpack_header(stored).method)
    if lossy is not None:
        return stored, lossy
    try:
        return plain_page(stored).data, None
    except (CodecError, MemoryError):
        return stored, None  # it only begins as one


def _of_bytes(seconds: float, memory_bytes: int) -> float:
    """Return what of the time of a read or write is its bytes'."""
    return seconds if memory_bytes >= _LONG_BYTES else 0.0


class PageEncoding:
    """Encodes pages by the codec of that name, and decodes what any server of the namespace stored.
    With ``NO_CODEC`` it only decodes. Any thread.

    What a codec costs and saves is measured in seconds of the threads that move pages. It is off
    while it costs more at every one of ``tiers``; one that was not measured yet counts for it, and
    without any it stays on. In a full store it stays on too: what gets no room is computed again.
    """

    def __init__(
        self,
        name: str,
        layout: PageLayout,
        *,
        tiers: Iterable[Tier] = (Tier.NVME,),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self._codec = PageCodec(layout) if name == NO_CODEC else make_codec(name, layout)
        self._clock = clock
        self._lock = threading.Lock()  # a leaf, of all below
        self._stats = EncodingStats(is_on=self.encodes)
        self._encoding, self._saving, self._decoding, self._writes = (_Pace() for _ in range(4))
        self._reads = {tier: _Pace() for tier in tiers}
        self._num_asked = 0
        self._has_told = False

    @property
    def encodes(self) -> bool:
        """Return whether there is a codec, which may be off."""
        return self.name != NO_CODEC

    def encode(self, page: Page, *, is_full: bool = False) -> Page:
        """Return what to store of a page: bytes that take fewer blocks, in parts of which some may
        be its own memory, or the page itself. ``is_full``: for it others must go."""
        if not self._wants(is_full=is_full):
            return page
        page_bytes = sum(segment.nbytes for segment in page)
        began = self._clock()
        try:
            encoded = self._codec.encode(page)
        except Exception as error:
            self.tell(error)
            return page
        took_s = self._clock() - began
        stored_bytes = sum(part.nbytes for part in encoded)
        saved_bytes = padded(page_bytes) - padded(stored_bytes)
        is_shorter = saved_bytes > 0 and stored_bytes <= page_bytes * (1 - MIN_SAVED_SHARE)
        with self._lock:
            self._encoding.note(took_s, page_bytes)
            self._saving.note(saved_bytes if is_shorter else 0, page_bytes)
            self._stats.encode_s += took_s
            if is_shorter:
                self._stats.num_encoded += 1
                self._stats.encoded_page_bytes += page_bytes
                self._stats.encoded_bytes += stored_bytes
        return encoded if is_shorter else page

    def decode(self, stored: memoryview, page: Page) -> Reason:
        """Fill a page from verified bytes that are fewer, and return ``OK``. ``MISS`` for those of
        a page of another length leaves it untouched. ``CORRUPT``: they do not decode;
        ``IO_ERROR``: that cannot be told."""
        page_bytes = sum(segment.nbytes for segment in page)
        if _encoded_from(stored) != page_bytes:
            return Reason.MISS
        began = self._clock()
        try:
            self._codec.decode(stored, page)
        except CodecError as error:
            self.tell(error)
            return Reason.CORRUPT
        except Exception as error:  # of memory, say: no damage, what pins want is kept
            self.tell(error)
            return Reason.IO_ERROR
        took_s = self._clock() - began
        with self._lock:
            self._decoding.note(took_s, page_bytes)
            self._stats.num_decoded += 1
            self._stats.decoded_page_bytes += page_bytes
            self._stats.decode_s += took_s
        return Reason.OK

    def note_read(self, tier: Tier, seconds: float, num_bytes: int, memory_bytes: int) -> None:
        """Note how long a thread took to read stored bytes from a tier, and what those pages take
        in memory."""
        pace = self._reads.get(tier)
        if pace is not None:
            with self._lock:
                pace.note(_of_bytes(seconds, memory_bytes), num_bytes)

    def note_write(self, seconds: float, num_bytes: int, memory_bytes: int) -> None:
        """Note how long a thread took to write stored bytes to NVMe, of an extent of pages that
        take so many in memory."""
        with self._lock:
            self._writes.note(_of_bytes(seconds, memory_bytes), num_bytes)

    def tell(self, error: Exception) -> None:
        """Say once that pages cannot be encoded or decoded."""
        with self._lock:
            has_told, self._has_told = self._has_told, True
        if not has_told:
            logger.warning(
                "the codec %s fails (%r): such pages are stored as they are, and misses where they "
                "were encoded; said once",
                self.name,
                error,
            )

    def stats(self) -> EncodingStats:
        with self._lock:
            return replace(self._stats)

    def _wants(self, *, is_full: bool) -> bool:
        """Return whether to encode a page."""
        if not self.encodes:
            return False
        with self._lock:
            self._num_asked += 1
            was_on, pays = self._stats.is_on, self._pays(is_full=is_full)
            self._stats.is_on = pays
            costs_s, saves_s = self._costs_s(), self._saves_s()
            is_sample = self._num_asked % _SAMPLED_PAGES == 0
        if was_on != pays:
            logger.info(
                "the codec %s is %s: to encode and decode a GiB of pages takes a thread %.2f s, "
                "and saves it %.2f s of reading and writing%s",
                self.name,
                "on again" if pays else "off",
                costs_s * (1 << 30),
                saves_s * (1 << 30),
                "; the store is full" if is_full else "",
            )
        return pays or is_sample

    def _pays(self, *, is_full: bool) -> bool:
        """The caller holds the lock."""
        if not self._reads or not self._encoding.is_known:
            return True
        if self._saving.per_byte < MIN_SAVED_SHARE:
            return False  # whatever the disk does; and what is never shorter is never decoded
        measured = (self._decoding, self._writes, *self._reads.values())
        if is_full or not all(pace.is_known for pace in measured):
            return True
        return self._costs_s() * (1 if self._stats.is_on else _MARGIN) <= self._saves_s()

    def _costs_s(self) -> float:
        return self._encoding.per_byte + self._decoding.per_byte

    def _saves_s(self) -> float:
        read_s = max((pace.per_byte for pace in self._reads.values()), default=0.0)
        return (read_s + self._writes.per_byte) * self._saving.per_byte
