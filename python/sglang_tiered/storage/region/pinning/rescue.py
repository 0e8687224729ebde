"""Writes the pinned pages of a region again before it goes. On the writer thread.

The new copy is found only once it is durable, and the region's file goes only then: whenever the
process dies, a sync fails or the power goes, one copy is found.
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

    import numpy.typing as npt

    from sglang_tiered.storage.region.device import Device
    from sglang_tiered.storage.region.health import Barrier, HealthMonitor
    from sglang_tiered.storage.region.index import PageIndex
    from sglang_tiered.storage.region.reader import RegionReader
    from sglang_tiered.storage.region.regions import Region
    from sglang_tiered.storage.region.state import StoreState

__all__ = ["Rescuer"]

_MAX_BYTES = 8 << 20  # in memory at once, as an extent of stores


class _Copy(NamedTuple):
    """Pages that lie in an extent of the region they go to, and are not found there yet."""

    keys: list[bytes]
    extent: Extent


class Rescuer:
    """Copies pinned pages from a region that is about to go to the end of the log."""

    def __init__(
        self,
        device: Device,
        health: HealthMonitor,
        barrier: Barrier,
        state: StoreState,
        reader: RegionReader,
    ) -> None:
        self._device = device
        self._health = health
        self._barrier = barrier
        self._state = state
        self._reader = reader

    def copy(self, victim: Region, region: Region) -> None:
        """Copy as many as fit behind the extents of ``region``, which has none under way; they are
        durable, and found in their new place, on return. A page that does not verify any more is
        forgotten; one whose read fails keeps its region. Raises ``OSError`` when the device fails:
        nothing has moved then, and ``region`` takes no more, for bytes lie behind its tail."""
        state = self._state
        with state.lock:
            rows = state.index.pinned_rows(victim.slot)
            pages = _pages_of(state.index, rows, victim)
            namespace, generation = state.namespace, state.generation
        copies: list[_Copy] = []
        for tenant, wanted in pages.items():
            while wanted:
                batch = self._leading(wanted, region, [copy.extent for copy in copies])
                if not batch:
                    break
                del wanted[: len(batch)]
                good = self._read(namespace, batch)
                if good:
                    tail = copies[-1].extent.end if copies else region.tail
                    table = page_table((item.key, item.length, item.checksum) for item in good)
                    extent = Extent(tail, namespace, table, tenant)
                    self._write(extent, good, region, len(region.extents) + len(copies))
                    copies.append(_Copy([item.key for item in good], extent))
        if not copies:
            return
        self._barrier.sync(region)
        self._barrier.sync_names([region])
        with state.lock:
            for copy in copies:
                self._publish(copy, victim, region, is_of_now=generation == state.generation)
            region.durable_tail = max(region.durable_tail, region.tail)

    def _leading(
        self, wanted: Sequence[Wanted], region: Region, placed: Sequence[Extent]
    ) -> list[Wanted]:
        """Return the first of these that fit the region as one extent behind those ``placed``, in
        memory of their own."""
        num_extents = len(region.extents) + len(placed) + 1
        num_pages = sum(len(extent.pages) for extent in (*region.extents, *placed))
        tail = placed[-1].end if placed else region.tail
        payload = count = 0
        for item in wanted[:MAX_EXTENT_PAGES]:
            size = payload + padded(item.length)
            end = tail + extent_header_bytes(count + 1) + size
            fits = fits_region(region.nbytes, end, num_extents, num_pages + count + 1)
            if not fits or (count and size > _MAX_BYTES):
                break
            payload, count = size, count + 1
        if not count:
            return []
        memory = aligned_buffer(payload)
        batch, start = [], 0
        for item in wanted[:count]:
            batch.append(item._replace(page=(memory[start : start + item.length],)))
            start += padded(item.length)
        return batch

    def _read(self, namespace: bytes, batch: Sequence[Wanted]) -> list[Wanted]:
        """Return the pages that verify; the others are hidden."""
        good: list[Wanted] = []
        left = list(batch)
        while left:
            span = plan_spans(left)[0]
            if self._health.state() is not Health.RUNNING:
                raise OSError(errno.EIO, "pinned pages cannot be read")
            reasons, error = self._reader.read(namespace, span)
            if error is not None:
                self._health.read_failed(error)
            num_done = 0
            with self._state.lock:
                for item, reason in zip(span, reasons, strict=True):
                    num_done += 1
                    if reason is Reason.OK:
                        good.append(item)
                        continue
                    self._state.hide(item, reason)
                    if reason is Reason.IO_ERROR:
                        break  # those behind it were not tried again, and are now
            del left[:num_done]
        return good

    def _write(self, extent: Extent, good: Sequence[Wanted], region: Region, ordinal: int) -> None:
        packed = pack_extent_header(extent, region.nonce, ordinal)
        data = aligned_buffer(len(packed) + extent.payload_bytes)
        data[: len(packed)] = packed
        start = len(packed)
        for item in good:
            data[start : start + item.length] = item.page[0]
            start += padded(item.length)
        with self._health.watch():
            written = self._device.writev(region.fd, [data], extent.offset)
        with self._state.lock:
            self._state.bytes_written += written
        if written != data.nbytes:
            raise OSError(errno.EIO, f"short write, {written} of {data.nbytes} bytes")

    def _publish(self, copy: _Copy, victim: Region, region: Region, *, is_of_now: bool) -> None:
        """Make what is durable found in its new place. The caller holds the lock."""
        state, extent = self._state, copy.extent
        region.extents.append(extent)
        region.tail = region.published_tail = extent.end
        state.regions.charge(region, extent.tenant, extent.payload_bytes)
        state.num_pages_reinserted += len(copy.keys)
        state.bytes_reinserted += int(extent.pages["length"].sum())
        if not is_of_now:
            return
        # Some may have been erased since they were read.
        alive = np.flatnonzero(state.index.are_in(victim.slot, key_words(copy.keys)))
        state.put_pages(
            [copy.keys[i] for i in alive.tolist()],
            region,
            extent.page_offsets()[alive],
            extent.pages[alive],
            extent.tenant,
        )


def _pages_of(
    index: PageIndex, rows: npt.NDArray[np.int64], victim: Region
) -> dict[bytes, list[Wanted]]:
    """Return pages of a region by tenant, in its order, without memory to read them to."""
    places = index.places(rows)
    columns = index.keys(rows), places.offsets, places.lengths, places.checksums
    by_tenant: dict[bytes, list[Wanted]] = {}
    for tenant, key, offset, length, checksum in zip(index.tenants_of(rows), *columns, strict=True):
        wanted = by_tenant.setdefault(tenant, [])
        wanted.append(Wanted(0, key, victim, offset, length, checksum, ()))
    return by_tenant
