"""Takes pages out of a region that is about to go. On the writer thread.

Hot pages are read, and stored again as those of callers are; pinned ones are written by this
thread. Of those the new copy is found only once it is durable, and the region's file goes only
then: whenever the process dies, a sync fails or the power goes, one copy is found.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.storage.base import Health, Reason
from sglang_tiered.storage.region.device import aligned_buffer
from sglang_tiered.storage.region.format import (
    MAX_EXTENT_PAGES,
    Extent,
    extent_header_bytes,
    fits_region,
    padded,
    page_table,
)
from sglang_tiered.storage.region.index import key_words
from sglang_tiered.storage.region.part import StorePart
from sglang_tiered.storage.region.pending import (
    ExtentWrite,
    Wanted,
    hashed_writes,
    is_one_write,
    packed_header,
    plan_spans,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from sglang_tiered.storage.region.health import Barrier
    from sglang_tiered.storage.region.index import PageIndex
    from sglang_tiered.storage.region.part import Common
    from sglang_tiered.storage.region.reader import RegionReader
    from sglang_tiered.storage.region.regions import Region

__all__ = ["Relocator", "pages_of"]

_MAX_BYTES = 8 << 20  # in memory at once, as an extent of stores


class Relocator(StorePart):
    """Reads pages of a region, or copies them to the end of the log."""

    def __init__(self, common: Common, barrier: Barrier, reader: RegionReader) -> None:
        super().__init__(common)
        self._barrier = barrier
        self._reader = reader

    def read(self, namespace: bytes, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Return the pages that verify, in memory of their own; the others are hidden. Raises
        ``OSError`` when the device fails."""
        memory = aligned_buffer(sum(padded(item.length) for item in wanted))
        left, start = [], 0
        for item in wanted:
            left.append(item._replace(page=(memory[start : start + item.length],)))
            start += padded(item.length)
        good: list[Wanted] = []
        while left:
            span = plan_spans(left)[0]
            if self._health.state() is not Health.RUNNING:
                raise OSError(errno.EIO, "pages that are to be moved cannot be read")
            reasons, error = self._reader.read(namespace, span)
            if error is None:
                self._health.read_succeeded()
            else:
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

    def copy(self, victim: Region, region: Region) -> None:
        """Copy as many as fit behind the extents of ``region``, which has none under way; they are
        durable, and found in their new place, on return. A page that does not verify any more is
        forgotten; one whose read fails keeps its region. Raises ``OSError`` when the device fails:
        nothing has moved then, and ``region`` takes no more, for bytes lie behind its tail."""
        state = self._state
        with state.lock:
            rows = state.index.pinned_rows(victim.slot)
            pages = pages_of(state.index, rows, victim)
            namespace, generation = state.namespace, state.generation
        copies: list[Extent] = []  # in the region they go to, and not found there yet
        for tenant, wanted in pages.items():
            while wanted:
                batch = self._leading(wanted, region, copies)
                if not batch:
                    break
                del wanted[: len(batch)]
                good = self.read(namespace, batch)
                if good:
                    tail = copies[-1].end if copies else region.tail
                    table = page_table((item.key, item.length, item.checksum) for item in good)
                    extent = Extent(tail, namespace, table, tenant)
                    ordinal = len(region.extents) + len(copies)
                    self._write(ExtentWrite(region, extent, ordinal, [], [g.page for g in good]))
                    copies.append(extent)
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
        """Return the first of these that fit the region as one extent behind those ``placed``."""
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
        return list(wanted[:count])

    def _write(self, write: ExtentWrite) -> None:
        writes = [each for piece in write.pieces for each in hashed_writes(piece)]
        if not is_one_write(write):
            writes.append((write.extent.offset, [packed_header(write)]))
        for offset, segments in writes:
            self.write(write.region.fd, segments, offset)

    def _publish(self, extent: Extent, victim: Region, region: Region, *, is_of_now: bool) -> None:
        """Make what is durable found in its new place. The caller holds the lock."""
        state, keys = self._state, extent.pages["key"].tolist()
        region.extents.append(extent)
        region.tail = region.published_tail = extent.end
        state.regions.charge(region, extent.tenant, extent.payload_bytes)
        state.num_pages_reinserted += len(keys)
        state.bytes_reinserted += int(extent.pages["length"].sum())
        if not is_of_now:
            return
        # Some may have been erased since they were read.
        alive = np.flatnonzero(state.index.are_in(victim.slot, key_words(keys)))
        state.put_pages(
            [keys[i] for i in alive.tolist()],
            region,
            extent.page_offsets()[alive],
            extent.pages[alive],
            extent.tenant,
        )


def pages_of(
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
