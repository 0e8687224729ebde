"""Writes the pinned pages of a region again before it goes. On the writer thread.

They are in the log twice, durably, before the region's file is unlinked: whenever the process dies
or the power goes, one copy is found.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_tiered.storage.base import Health, Reason
from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.storage.region.format import (
    MAX_EXTENT_PAGES,
    Extent,
    extent_header_bytes,
    fits_region,
    pack_extent_header,
    padded,
    page_table,
)
from sglang_tiered.storage.region.index import key_words
from sglang_tiered.storage.region.reader import Wanted, plan_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.storage.region.device import Device
    from sglang_tiered.storage.region.health import HealthMonitor
    from sglang_tiered.storage.region.reader import RegionReader
    from sglang_tiered.storage.region.regions import Region
    from sglang_tiered.storage.region.state import StoreState

__all__ = ["Rescuer"]

_MAX_BYTES = 8 << 20  # in memory at once, as an extent of stores


class _Batch(NamedTuple):
    """Pinned pages of one tenant that fit the region they go to as one extent."""

    wanted: list[Wanted]
    tenant: bytes
    namespace: bytes
    generation: int


class Rescuer:
    """Copies pinned pages from a region that is about to go to the end of the log."""

    def __init__(
        self, device: Device, health: HealthMonitor, state: StoreState, reader: RegionReader
    ) -> None:
        self._device = device
        self._health = health
        self._state = state
        self._reader = reader

    def copy(self, victim: Region, region: Region) -> None:
        """Copy as many as fit behind the extents of ``region``, which has none under way; they are
        durable on return, and found in their new place. A page that cannot be read any more is
        forgotten. Raises ``OSError`` when the device fails: nothing is lost."""
        copied = False
        while True:
            with self._state.lock:
                batch = self._next(victim, region)
            if batch is None:
                break
            good = self._read(batch)
            if good:
                self._write(batch, good, victim, region)
                copied = True
        if not copied:
            return
        try:
            with self._health.watch():
                self._device.sync(region.fd)
        except OSError:
            region.suspect = True
            raise
        with self._health.watch():
            self._device.sync_directory()
        with self._state.lock:
            region.durable_tail = max(region.durable_tail, region.tail)

    def _next(self, victim: Region, region: Region) -> _Batch | None:
        """Return what to copy next; None when nothing is left or fits. The caller holds the
        lock."""
        state, index = self._state, self._state.index
        rows = index.pinned_rows(victim.slot)
        if not rows.size:
            return None
        tenants = index.tenants_of(rows)
        of_one = np.flatnonzero([tenant == tenants[0] for tenant in tenants])
        rows = rows[of_one[:MAX_EXTENT_PAGES]]
        keys, places = index.keys(rows), index.places(rows)
        num_extents = len(region.extents) + 1
        num_pages = sum(len(extent.pages) for extent in region.extents)
        payload = count = 0
        for length in places.lengths:
            size = payload + padded(length)
            end = region.tail + extent_header_bytes(count + 1) + size
            fits = fits_region(region.nbytes, end, num_extents, num_pages + count + 1)
            if not fits or (count and size > _MAX_BYTES):
                break
            payload, count = size, count + 1
        if not count:
            return None
        memory = aligned_buffer(payload)
        wanted, start = [], 0
        for i in range(count):
            length = places.lengths[i]
            page = (memory[start : start + length],)
            start += padded(length)
            at = places.offsets[i], length, places.checksums[i]
            wanted.append(Wanted(i, keys[i], victim, *at, page))
        return _Batch(wanted, tenants[0], state.namespace, state.generation)

    def _read(self, batch: _Batch) -> list[Wanted]:
        """Return the pages that verify; the others are forgotten."""
        good: list[Wanted] = []
        for span in plan_spans(batch.wanted):
            if self._health.state() is not Health.RUNNING:
                raise OSError(errno.EIO, "pinned pages cannot be read")
            reasons, error = self._reader.read(batch.namespace, span)
            if error is not None:
                self._health.read_failed(error)
            with self._state.lock:
                for item, reason in zip(span, reasons, strict=True):
                    if reason is Reason.OK:
                        good.append(item)
                        continue
                    region = item.region
                    self._state.index.drop(item.key, region.slot, item.offset)
                    if reason is Reason.IO_ERROR:
                        break  # those behind it were not tried again, and will be
        return good

    def _write(self, batch: _Batch, good: Sequence[Wanted], victim: Region, region: Region) -> None:
        state = self._state
        table = page_table((item.key, item.length, item.checksum) for item in good)
        extent = Extent(region.tail, batch.namespace, table, batch.tenant)
        packed = pack_extent_header(extent, region.nonce, len(region.extents))
        data = aligned_buffer(len(packed) + extent.payload_bytes)
        data[: len(packed)] = packed
        start = len(packed)
        for item in good:
            data[start : start + item.length] = item.page[0]
            start += padded(item.length)
        with self._health.watch():
            written = self._device.writev(region.fd, [data], extent.offset)
        if written != data.nbytes:
            raise OSError(errno.EIO, f"short write, {written} of {data.nbytes} bytes")
        keys = [item.key for item in good]
        with state.lock:
            region.extents.append(extent)
            region.tail = region.published_tail = extent.end
            region.dirty = state.any_dirty = True
            state.sync_ready.notify()
            state.regions.charge(region, extent.tenant, extent.payload_bytes)
            state.bytes_written += written
            state.num_pages_reinserted += len(good)
            state.bytes_reinserted += sum(item.length for item in good)
            if batch.generation != state.generation:
                return
            # Some may have been purged or forgotten since they were read.
            alive = np.flatnonzero(state.index.are_in(victim.slot, key_words(keys)))
            state.put_pages(
                [keys[i] for i in alive.tolist()],
                region,
                extent.page_offsets()[alive],
                table[alive],
                batch.tenant,
            )
