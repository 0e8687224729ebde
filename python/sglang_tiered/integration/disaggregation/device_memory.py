"""KV pools in device memory, as ``transfer`` wants them.

A slab is one ``page_copy`` launch into device memory and one copy from there into pinned host
memory, which is sent as it is. Both are queued, each on a stream of its own, and two slabs of
device memory take turns, so one is gathered while another is copied out. Nothing here has run on a
CUDA device; the tests run it on CPU tensors and on the asynchronous platform.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_tiered.transfer.memory import PagedMemory
from sglang_tiered_kernels.page_copy import Band, PagedPool, gather, scatter, warm_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang_tiered.transfer.memory import Buffer, Bytes, Pages, SlabPiece, TokenSlice


MAX_POOLS = 4096
"""Tables of addresses that are kept: one for each place in a page where slabs are cut."""

INDEX_BYTES = 4
ALIGNMENT = 16
"""Of what lies behind each other in one slab of device memory."""


class _Pointer:
    """Device memory by address, in the form that torch takes without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def are_done(*events: Any) -> Callable[[], bool] | None:
    """What says, on any thread, whether the events have happened; None where there are none."""
    queries = [event.query for event in events if event is not None]
    return (lambda: all(query() for query in queries)) if queries else None


def writes_so_far(forward_stream: Any) -> list[Any]:
    """Events after which the device has done what the scheduler had queued. A forward under way
    still writes for a request that has ended, into a page that is free and may be a room's. A CPU
    has no such events, and no forward under way here."""
    streams = forward_stream, torch.get_device_module().current_stream()
    events = [stream.record_event() for stream in streams]
    return [event for event in events if event is not None]


@dataclass(eq=False, slots=True)
class _DeviceSlab:
    """Device memory between a pool and the host. ``copied_out``: its last use."""

    memory: torch.Tensor
    copied_out: Any = None


class DeviceMemory(PagedMemory):
    """Over buffers of one device; ``cpu`` for tests. The caller keeps the pool
    alive. Made on any thread, which compiles the copies of whole pages and of ``shares``; then used
    by the endpoint's.

    shares: of a token's bytes, that peers with more ranks ask for.
    """

    is_host = False

    def __init__(
        self, buffers: Sequence[Buffer], device: str, shares: Sequence[TokenSlice] = ()
    ) -> None:
        super().__init__(buffers)
        self._device = torch.device(device)
        self._is_cuda = self._device.type == "cuda"
        self._module: Any = torch.get_device_module(self._device)
        self._computing = self._module.Stream(self._device)  # gathers and scatters
        self._copying = self._module.Stream(self._device)  # to host memory
        none = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._slabs = deque([_DeviceSlab(none), _DeviceSlab(none)])
        self._under_way: deque[tuple[Any, Bytes]] = deque()
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._views = [self._view(buffer) for buffer in self.buffers]
        self._pools: dict[tuple[tuple[int, ...], TokenSlice | None], PagedPool] = {}
        self._compile(shares)

    def _compile(self, shares: Sequence[TokenSlice]) -> None:
        first = {buffer.page_bytes: index for index, buffer in enumerate(self.buffers)}
        for page_bytes, index in first.items():
            for part in (None, *shares):
                if part is None or page_bytes % part.token_bytes == 0:
                    warm_up(self._pool((index,), part))

    def enter_thread(self) -> None:
        """Make the rank's device the thread's own: a thread begins on device 0, where it would open
        a context and launch Triton's kernels."""
        self._module.set_device(self._device)

    def new_buffer(self, num_bytes: int) -> Bytes:
        """Pinned, so that a copy into it goes on by itself."""
        made: Bytes = self._pinned(num_bytes).numpy()
        return made

    def place(self, pages: Pages) -> torch.Tensor:
        """[num_pages] int32 on the device, for streams of this object."""
        with self._module.stream(self._computing):
            staged = self._pinned(pages.nbytes).view(torch.int32)
            staged.numpy()[:] = pages
            return staged.to(self._device, non_blocking=True)

    def begin_gather(
        self, pieces: Sequence[SlabPiece], placed: torch.Tensor, out: Bytes
    ) -> Callable[[], None]:
        """SGLang has computed the pages: it hands them over only then, or with an event that the
        endpoint has seen."""
        self._drop_copied()
        slab = self._slabs[0]
        self._slabs.rotate()
        with self._module.stream(self._computing):
            if slab.copied_out is not None:
                self._computing.wait_event(slab.copied_out)
            slab.memory = self._at_least(slab.memory, out.nbytes)
            for pool, part in self._parts(pieces, len(placed), slab.memory):
                gather(pool, placed, part)
            gathered = self._recorded(self._computing)
        with self._module.stream(self._copying):
            self._copying.wait_event(gathered)
            self._copy_out(slab.memory[: out.nbytes], out)
            slab.copied_out = copied = self._recorded(self._copying)
        self._under_way.append((copied, out))
        wait: Callable[[], None] = copied.synchronize
        return wait

    def scatter_slab(self, pieces: Sequence[SlabPiece], pages: Pages, data: Bytes) -> None:
        """Waits until the pages are there, so that a closed room is not written any more. The
        numbers go over in one copy with the bytes."""
        start = -(-data.nbytes // ALIGNMENT) * ALIGNMENT
        total = start + INDEX_BYTES * len(pages)
        with self._module.stream(self._computing):
            if self._staging.numel() < total:
                self._staging = self._pinned(total)
            staged = self._staging[:total]
            staged.numpy()[: data.nbytes] = data
            staged[start:].view(torch.int32).numpy()[:] = pages
            slab = staged.to(self._device, non_blocking=True)
            placed = slab[start:].view(torch.int32)
            for pool, part in self._parts(pieces, len(pages), slab):
                scatter(part, placed, pool)
        self.flush()

    def flush(self) -> None:
        """Returns when all that was scattered may be read, on any stream."""
        self._recorded(self._computing).synchronize()

    def _parts(
        self, pieces: Sequence[SlabPiece], num_pages: int, slab: torch.Tensor
    ) -> Iterator[tuple[PagedPool, torch.Tensor]]:
        """The pools of pieces that are alike, mostly one, each with its part of the slab."""

        def kind(piece: SlabPiece) -> tuple[int, int, TokenSlice | None]:
            buffer = self.buffers[piece.buffer]
            return buffer.num_bytes, buffer.page_bytes, piece.part

        start = 0
        for (_, _, part), alike in groupby(pieces, kind):
            pool = self._pool(tuple(piece.buffer for piece in alike), part)
            shape = pool.slab_shape(num_pages)
            size = math.prod(shape)
            yield pool, slab[start : start + size].view(shape)
            start += size

    def _pool(self, buffers: tuple[int, ...], part: TokenSlice | None) -> PagedPool:
        pool = self._pools.get((buffers, part))
        if pool is None:
            if len(self._pools) == MAX_POOLS:
                self._pools.clear()
            band = None if part is None else Band(part.token_bytes, part.low, part.high)
            pool = PagedPool([self._views[index] for index in buffers], band)
            self._pools[buffers, part] = pool
        return pool

    def _copy_out(self, memory: torch.Tensor, out: Bytes) -> None:
        torch.from_numpy(out).copy_(memory, non_blocking=True)

    def _recorded(self, stream: Any) -> Any:
        event = self._module.Event()
        event.record(stream)
        return event

    def _drop_copied(self) -> None:
        """Let go of buffers that nothing is copied into any more: one whose room was dropped has no
        other owner."""
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()

    def _at_least(self, memory: torch.Tensor, num_bytes: int) -> torch.Tensor:
        if memory.numel() >= num_bytes:
            return memory
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)

    def _view(self, buffer: Buffer) -> torch.Tensor:
        """[pages, page_bytes]"""
        size = buffer.num_pages * buffer.page_bytes
        if self._is_cuda:
            flat = torch.as_tensor(_Pointer(buffer.address, size), device=self._device)
        else:
            memory: Any = np.ctypeslib.as_array(
                (ctypes.c_uint8 * size).from_address(buffer.address)
            )
            flat = torch.from_numpy(memory)
        return flat.view(buffer.num_pages, buffer.page_bytes)
