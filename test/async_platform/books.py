"""Books of host pages and device slots: who wrote them, who is reading them, and what may not be.

A violation is told even where the bytes happen to be right. Whether a write is *ordered before* an
operation is asked of the clocks of streams: it is visible, or the operation's stream has waited for
something behind it. So a missing fence shows whatever the timing.

What is free is poisoned with a pattern that no KV holds: large, finite numbers in every dtype that
change the output of a model that reads one row of them. Callers hold the device's lock where they
touch what copies touch. ``planted_faults.py`` has an example of each violation; those of an idle
scheduler are in ``rest.py``.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from device import Device, Stream
    from report import Report

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

PATTERN = np.uint32(0x4240C240)
"""48.19 in float32, 48 and -48 in bfloat16, 3.1 in float16, 2 and -2.25 in float8_e4m3."""
ROW_BYTES, LOOKED_AT_BYTES = 64, 16
"""A page holds poison if the first bytes of any row so long are all of the pattern."""
MAX_POISONED_BYTES = 1 << 31
"""Larger pools are not poisoned as a whole, which would take all of their memory."""
NUM_NAMED = 8


def ids(indices: torch.Tensor) -> Ids:
    array: Ids = indices.cpu().numpy()
    return array


def check_aligned(report: Report, who: str, indices: torch.Tensor, page_size: int) -> None:
    slots = ids(indices)
    if page_size > 1 and slots.size:
        pages = slots[: slots.size // page_size * page_size].reshape(-1, page_size)
        expected = pages[:, :1] // page_size * page_size + np.arange(page_size)
        if slots.size % page_size or (pages != expected).any():
            report.violation("unaligned-page", who=who, slots=slots[:NUM_NAMED].tolist())


@dataclass(eq=False)
class Book:
    pool: Any
    report: Report

    def tell(self, what: str, places: Ids, bad: Mask) -> None:
        if bad.any():
            named, number = places[bad][:NUM_NAMED].tolist(), int(bad.sum())
            self.report.violation(what, pool=type(self.pool).__name__, places=named, number=number)


@dataclass(eq=False)
class HostPages(Book):
    def __post_init__(self) -> None:
        self.size = int(self.pool.logical_page_size)
        number = int(self.pool.logical_size) // self.size
        self.owned, self.valid = np.zeros(number, bool), np.zeros(number, bool)
        self.readers, self.writers = np.zeros(number, np.int32), np.zeros(number, np.int32)
        self._has_owners = False  # pools beside another take its slots, and never allocate

    def pages(self, indices: torch.Tensor) -> Ids:
        return np.unique(ids(indices) // self.size)

    def views(self, page: int) -> list[npt.NDArray[np.uint32]]:
        """The memory of a page; empty where the pool cannot say where it lies, or has none left."""
        import torch

        if self.pool.kv_buffer is None:
            return []
        indices = torch.arange(page * self.size, (page + 1) * self.size)
        try:
            pointers, sizes = self.pool.get_page_buffer_meta(indices)
        except (NotImplementedError, ValueError):
            return []
        return [
            np.frombuffer((ctypes.c_uint32 * (size // 4)).from_address(pointer), np.uint32)
            for pointer, size in zip(pointers, sizes, strict=True)
        ]

    def poison(self, pages: Ids) -> None:
        for page in pages:
            for view in self.views(int(page)):
                view[:] = PATTERN

    def holds_poison(self, page: int) -> bool:
        row, looked_at = ROW_BYTES // 4, LOOKED_AT_BYTES // 4
        for view in self.views(page):
            rows = view[: len(view) // row * row].reshape(-1, row)[:, :looked_at]
            if (rows == PATTERN).all(axis=1).any():
                return True
        return False

    def checksums(self, pages: Ids) -> Ids:
        return np.array([sum(map(zlib.crc32, self.views(int(page)))) for page in pages], np.int64)

    def allocated(self, indices: torch.Tensor) -> None:
        pages = self.pages(indices)
        if not self._has_owners:
            self._has_owners = True
            is_small = self.pool.size * self.pool.size_per_token <= MAX_POISONED_BYTES
            self.poison(np.arange(len(self.owned)) if is_small else pages)
        else:
            views = [self.views(int(page)) for page in pages]
            written = np.array([any((v != PATTERN).any() for v in of) for of in views], bool)
            self.tell("host-page-written-after-free", pages, written)
        self.owned[pages], self.valid[pages] = True, False

    def freed(self, indices: torch.Tensor) -> None:
        pages = self.pages(indices)
        self.tell("host-free-while-read", pages, self.readers[pages] > 0)
        self.tell("host-free-while-written", pages, self.writers[pages] > 0)
        self.owned[pages] = self.valid[pages] = False
        self.poison(pages)

    def cleared(self) -> None:
        pages = np.flatnonzero(self.owned)
        in_flight = (self.readers[pages] > 0) | (self.writers[pages] > 0)
        self.tell("host-clear-in-flight", pages, in_flight)
        self.owned[:] = self.valid[:] = False
        self.poison(pages)

    def begin_write(self, indices: torch.Tensor, who: str) -> None:
        pages = self.pages(indices)
        self.tell(f"{who}-into-free-host-page", pages, self._has_owners & ~self.owned[pages])
        in_use = (self.writers[pages] > 0) | (self.readers[pages] > 0)
        self.tell(f"{who}-into-host-page-in-use", pages, in_use)
        self.writers[pages] += 1

    def end_write(self, indices: torch.Tensor) -> None:
        pages = self.pages(indices)
        self.writers[pages] -= 1
        self.valid[pages] = True

    def not_written(self, indices: torch.Tensor) -> None:
        """A write that ended gave these nothing."""
        self.valid[self.pages(indices)] = False

    def begin_read(self, indices: torch.Tensor, who: str) -> Ids:
        pages = self.pages(indices)
        owned = self.owned[pages] if self._has_owners else np.ones(len(pages), bool)
        self.tell(f"{who}-of-free-host-page", pages, ~owned)
        self.tell(f"{who}-before-copy-is-done", pages, owned & ~self.valid[pages])
        self.readers[pages] += 1
        return pages

    def end_read(self, indices: torch.Tensor) -> None:
        self.readers[self.pages(indices)] -= 1

    def begin_store(self, indices: torch.Tensor) -> Ids:
        """Checksums of the pages, for ``end_store``."""
        pages = self.begin_read(indices, "store")
        poisoned = np.array([self.holds_poison(int(page)) for page in pages], bool)
        self.tell("store-of-poison", pages, poisoned)
        return self.checksums(pages)

    def end_store(self, indices: torch.Tensor, before: Ids) -> None:
        pages = self.pages(indices)
        self.tell("host-page-changed-during-store", pages, self.checksums(pages) != before)
        self.readers[pages] -= 1


class _Last:
    """The last operation of some kind on each slot: which stream's, and its index there."""

    def __init__(self, number: int) -> None:
        self._stream = np.full(number, -1, np.int16)
        self._index = np.zeros(number, np.int64)
        self._streams: list[Stream] = []

    def note(self, slots: Ids, stream: Stream, index: int) -> None:
        if stream not in self._streams:
            self._streams.append(stream)
        self._stream[slots] = self._streams.index(stream)
        self._index[slots] = index

    def unordered(
        self, slots: Ids, stream: Stream | None, of: Callable[[Stream], bool] = lambda stream: True
    ) -> Mask:
        """Which slots had one that is neither done nor before what comes on a stream next."""
        bad = np.zeros(len(slots), bool)
        for number, other in enumerate(self._streams):
            if other is not stream and of(other):
                known = max(0 if stream is None else stream.clock.get(other, 0), other.visible)
                bad |= (self._stream[slots] == number) & (self._index[slots] > known)
        return bad


def _is_lazy(stream: Stream) -> bool:
    return stream.lazy


class DeviceSlots(Book):
    def __init__(self, pool: Any, device: Device, report: Report, page_size: int) -> None:
        super().__init__(pool, report)
        self.device, self.page_size = device, page_size
        self.buffers = list(_buffers(pool))
        self.number = self.buffers[0].shape[0] if self.buffers else 0
        self.copied = np.zeros(self.number, np.int32)
        self.written, self.read = _Last(self.number), _Last(self.number)

    def begin_copy_out(self, indices: torch.Tensor, stream: Stream) -> None:
        slots = ids(indices)
        self.tell("d2h-not-ordered-after-writer", slots, self.written.unordered(slots, stream))
        self.copied[slots] += 1

    def end_copy_out(self, indices: torch.Tensor) -> None:
        self.copied[ids(indices)] -= 1

    def begin_copy_in(self, indices: torch.Tensor, stream: Stream) -> None:
        slots = ids(indices)
        bad = self.written.unordered(slots, stream) | self.read.unordered(slots, stream)
        self.tell("h2d-into-slots-in-use", slots, bad | (self.copied[slots] > 0))

    def copied_in(self, indices: torch.Tensor, stream: Stream, index: int) -> None:
        self.written.note(ids(indices), stream, index)

    def begin_forward(self, writes: Ids, stream: Stream) -> None:
        bad = self.written.unordered(writes, stream, _is_lazy) | (self.copied[writes] > 0)
        self.tell("forward-into-slots-in-use", writes, bad & (writes >= self.page_size))

    def end_forward(self, reads: Ids, writes: Ids, stream: Stream, index: int) -> None:
        bad = self.written.unordered(reads, stream, _is_lazy)
        self.tell("forward-read-before-load", reads, bad)
        self.read.note(reads, stream, index)
        self.written.note(writes, stream, index)

    def freed(self, slots: Ids) -> None:
        slots = slots[slots < self.number]
        self.tell("device-free-while-copied", slots, self.copied[slots] > 0)
        bad = self.written.unordered(slots, None, _is_lazy)
        self.tell("device-free-while-loaded", slots, bad)
        self.poison(slots)

    def cleared(self) -> None:
        """All of them; the first page takes what padding writes."""
        slots = np.arange(self.page_size, self.number)
        if sum(buffer.nbytes for buffer in self.buffers) > MAX_POISONED_BYTES:
            slots = slots[self.copied[slots] > 0]
        self.freed(slots)

    def poison(self, slots: Ids) -> None:
        import torch

        for buffer in self.buffers if slots.size else ():
            rows = buffer.view(buffer.shape[0], -1).view(torch.uint8).numpy()
            if rows.shape[1] % 4 == 0:
                rows.view(np.uint32)[slots] = PATTERN


def _buffers(pool: Any) -> Iterator[torch.Tensor]:
    for name in ("k_buffer", "v_buffer", "kv_buffer"):
        yield from getattr(pool, name, None) or ()
