"""Appends extents to the open region, seals it when full. One thread: the store's writer.

A failed write indexes nothing and the next extent goes to the same offset: whatever the failed one
left behind carries no valid header at a later ordinal of this region's nonce, so recovery cannot
take it for data.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING

from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    MAX_EXTENT_HEADER_BYTES,
    MAX_EXTENT_PAGES,
    NONCE_BYTES,
    Extent,
    PageRecord,
    RegionHeader,
    Trailer,
    extent_header_bytes,
    footer_bytes,
    pack_extent_header,
    pack_footer,
    pack_region_header,
    pack_trailer,
    padded,
    page_checksum,
    region_name,
)
from sglang_tiered.storage.region.index import Entry, Region

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.storage.base import Page
    from sglang_tiered.storage.region.device import Device
    from sglang_tiered.storage.region.health import HealthMonitor
    from sglang_tiered.storage.region.reclaim import Reclaimer

__all__ = ["NO_SPACE_ERRNOS", "RegionWriter", "seal_region", "write_fully"]

NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_MAX_EXTENT_BYTES = 64 << 20  # bounds how long one write keeps the device
_MAX_WRITE_FAILURES = 3


def write_fully(device: Device, fd: int, segments: Sequence[memoryview], offset: int) -> int:
    """Write all segments or raise ``OSError``; returns the bytes written."""
    nbytes = sum(segment.nbytes for segment in segments)
    written = device.writev(fd, segments, offset)
    if written != nbytes:
        raise OSError(errno.EIO, f"short write, {written} of {nbytes} bytes")
    return nbytes


def seal_region(device: Device, region: Region) -> int:
    """Write the footer and make the region durable; returns the bytes written.

    Raises ``OSError`` when the device refuses; the region is readable all the same, and recovery
    walks it instead of reading the footer.
    """
    footer = pack_footer(region.extents, region.nonce)
    offset = region.nbytes - BLOCK_BYTES - len(footer)
    assert region.tail <= offset, f"{region.name}: footer at {offset} over tail {region.tail}"
    trailer = pack_trailer(Trailer(region.nonce, len(region.extents), offset, len(footer)))
    written = write_fully(device, region.fd, [memoryview(footer + trailer)], offset)
    device.sync(region.fd)
    device.sync_directory()
    return written


class RegionWriter:
    """Owns the open region. Every method runs on the writer thread, without the lock held."""

    def __init__(
        self,
        device: Device,
        health: HealthMonitor,
        reclaimer: Reclaimer,
        region_bytes: int,
        next_sequence: int,
    ) -> None:
        self._device = device
        self._health = health
        self._reclaimer = reclaimer
        self._region_bytes = region_bytes
        self._next_sequence = next_sequence
        self._region: Region | None = None
        self._num_pages = 0  # in the open region
        self._num_failures = 0  # writes in a row at the open region's tail
        self._header = aligned_buffer(MAX_EXTENT_HEADER_BYTES)
        self._zeros = aligned_buffer(BLOCK_BYTES).toreadonly()
        self.bytes_written = 0

    def append(
        self, namespace: bytes, pages: Sequence[tuple[bytes, Page]]
    ) -> list[tuple[bytes, Entry]]:
        """Write one extent with as many leading pages as fit, at least one; returns their places.

        Raises ``OSError`` when nothing was written that counts; ``NO_SPACE_ERRNOS`` when neither
        the cap nor the disk has room.
        """
        region = self._writable_region()
        count = self._num_fitting(region, pages)
        if count == 0:
            self.seal()
            region = self._writable_region()
            count = self._num_fitting(region, pages)
            assert count > 0, "the store refuses pages larger than a region"
        chosen = pages[:count]
        records = tuple(
            PageRecord(key, _num_bytes(page), page_checksum(namespace, key, page))
            for key, page in chosen
        )
        extent = Extent(region.tail, namespace, records)
        self._write(region, extent, [page for _, page in chosen])
        region.extents.append(extent)
        region.tail = extent.end
        self._num_pages += count
        return [
            (record.key, Entry(region, offset, record.length, record.checksum))
            for record, offset in extent.placements()
        ]

    def seal(self) -> None:
        """Close the open region to appends. Raises ``OSError`` when its footer was not made
        durable; the region counts as sealed either way."""
        region = self._region
        if region is None:
            return
        self._region = None
        try:
            with self._health.watch():
                self.bytes_written += seal_region(self._device, region)
        finally:
            region.extents = []
            region.sealed = True

    def abandon(self) -> None:
        """Append no more to the open region, without a footer: its file is about to go, or is not
        what it should be. What it holds is served while it verifies."""
        region, self._region = self._region, None
        if region is not None:
            region.extents = []
            region.sealed = True

    def finish(self) -> None:
        """Seal before closing; a region without extents is removed. Raises ``OSError``."""
        region = self._region
        if region is not None and not region.extents:
            self.abandon()
            self._reclaimer.remove(region)
        self.seal()

    def _writable_region(self) -> Region:
        region = self._region
        if region is not None:
            if self._num_failures < _MAX_WRITE_FAILURES and self._is_intact(region):
                return region
            # Somebody deleted or cut the file, or the device rejects this place.
            self.abandon()
        self._region = self._create()
        self._num_pages = self._num_failures = 0
        return self._region

    def _is_intact(self, region: Region) -> bool:
        with self._health.watch():
            return self._device.is_intact(region.fd, region.nbytes)

    def _create(self) -> Region:
        while True:
            if not self._reclaimer.reserve(self._region_bytes):
                raise OSError(errno.ENOSPC, "the cap leaves no room for a region")
            try:
                return self._create_reserved()
            except OSError as error:
                self._reclaimer.unreserve(self._region_bytes)
                if error.errno not in NO_SPACE_ERRNOS or not self._reclaimer.evict_one():
                    raise

    def _create_reserved(self) -> Region:
        # A failed attempt uses its number up, so a leftover file cannot block the next one.
        sequence = self._next_sequence
        self._next_sequence += 1
        nonce = os.urandom(NONCE_BYTES)
        header = RegionHeader(self._region_bytes, sequence, nonce, time.time_ns())
        name = region_name(sequence)
        with self._health.watch():
            fd = self._device.create(name, self._region_bytes)
            try:
                block = memoryview(pack_region_header(header))
                self.bytes_written += write_fully(self._device, fd, [block], 0)
            except OSError:
                with contextlib.suppress(OSError):
                    self._device.close(fd)
                with contextlib.suppress(OSError):
                    self._device.unlink(name)
                raise
        region = Region(sequence, fd, self._region_bytes, nonce, tail=BLOCK_BYTES)
        self._reclaimer.adopt(region)
        return region

    def _num_fitting(self, region: Region, pages: Sequence[tuple[bytes, Page]]) -> int:
        """Leading pages that fit the region with their entries in its footer."""
        num_extents = len(region.extents) + 1
        payload = count = 0
        for _, page in pages[:MAX_EXTENT_PAGES]:
            payload += padded(_num_bytes(page))
            end = region.tail + extent_header_bytes(count + 1) + payload
            reserved = footer_bytes(num_extents, self._num_pages + count + 1) + BLOCK_BYTES
            if end + reserved > region.nbytes or (count and payload > _MAX_EXTENT_BYTES):
                break
            count += 1
        return count

    def _write(self, region: Region, extent: Extent, pages: Sequence[Page]) -> None:
        header = pack_extent_header(extent, region.nonce, len(region.extents))
        self._header[: len(header)] = header
        segments = [self._header[: len(header)]]
        for page, record in zip(pages, extent.pages, strict=True):
            segments.extend(segment for segment in page if segment.nbytes)
            padding = padded(record.length) - record.length
            if padding:
                segments.append(self._zeros[:padding])
        try:
            self._write_once(region, extent, segments)
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS or not self._reclaimer.evict_one():
                raise
            self._write_once(region, extent, segments)

    def _write_once(self, region: Region, extent: Extent, segments: Sequence[memoryview]) -> None:
        try:
            with self._health.watch():
                self.bytes_written += write_fully(self._device, region.fd, segments, extent.offset)
        except OSError:
            self._num_failures += 1
            raise
        self._num_failures = 0


def _num_bytes(page: Page) -> int:
    return sum(segment.nbytes for segment in page)
