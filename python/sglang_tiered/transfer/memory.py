"""Access to pages: gather out of and scatter into the buffers of a KV pool.

``PagedMemory`` is what the endpoints need; ``HostMemory`` serves pools in ordinary memory (SGLang
on a CPU, and SGLang's host pool). Device pools implement it in ``integration``.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sglang_tiered.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


Pages = np.ndarray[Any, np.dtype[np.int32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Buffer:
    """One contiguous buffer of pages, not owned: address, size, and bytes of one page."""

    address: int
    num_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class TokenSlice:
    """Bytes [low, high) of each token of a page whose tokens have ``token_bytes``."""

    token_bytes: int
    low: int
    high: int

    @property
    def num_bytes(self) -> int:
        return self.high - self.low


@dataclass(frozen=True, slots=True)
class SlabPiece:
    """What a slab holds of one buffer: ``page_bytes`` of each page, all of it without a slice."""

    buffer: int
    page_bytes: int
    part: TokenSlice | None = None


class PagedMemory(Protocol):
    """The pages of one pool. Called on the endpoint's thread only.

    Page numbers must have passed ``check_pages``.
    """

    @property
    def buffers(self) -> Sequence[Buffer]: ...

    @property
    def is_host(self) -> bool:
        """Whether another process of this machine could read the buffers."""
        ...

    def enter_thread(self) -> None:
        """The endpoint's thread calls this before all else."""
        ...

    def new_buffer(self, num_bytes: int) -> Bytes:
        """Host memory that a slab is best gathered into; freed with its last reference."""
        ...

    def place(self, pages: Pages) -> Any:
        """The numbers of a chunk's pages where ``begin_gather`` reads them: once for all slabs of
        the chunk. Can be sliced as ``pages`` can."""
        ...

    def begin_gather(
        self, pieces: Sequence[SlabPiece], placed: Any, out: Bytes
    ) -> Callable[[], None]:
        """Begin to copy pages to ``out``: one piece after the other, in each the pages in order.
        Filled once the returned call has returned; until then ``out`` must not be used for
        something else. The pages must have been computed."""
        ...

    def scatter_slab(self, pieces: Sequence[SlabPiece], pages: Pages, data: Bytes) -> None:
        """Copy ``data`` into pages, the inverse of a gather; ``data`` is free on return."""
        ...

    def flush(self) -> None:
        """Wait until everything scattered so far may be read."""
        ...


class HostMemory:
    """Buffers in this process's memory, by address. The caller keeps the pool alive."""

    is_host = True

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = tuple(buffers)
        self._views = []
        for buffer in self.buffers:
            rows = buffer.num_bytes // buffer.page_bytes
            memory: Any = (ctypes.c_ubyte * (rows * buffer.page_bytes)).from_address(buffer.address)
            self._views.append(np.frombuffer(memory, np.uint8).reshape(rows, buffer.page_bytes))

    def enter_thread(self) -> None:
        """Does nothing: all threads see this memory alike."""

    def new_buffer(self, num_bytes: int) -> Bytes:
        return np.empty(num_bytes, np.uint8)

    def place(self, pages: Pages) -> Pages:
        return pages

    def begin_gather(
        self, pieces: Sequence[SlabPiece], placed: Pages, out: Bytes
    ) -> Callable[[], None]:
        """Copies when it is waited for: nothing else would do it meanwhile."""
        return partial(self._gather_slab, pieces, placed, out)

    def _gather_slab(self, pieces: Sequence[SlabPiece], pages: Pages, out: Bytes) -> None:
        offset = 0
        for piece in pieces:
            size = piece.page_bytes * len(pages)
            self.gather(piece.buffer, pages, piece.part, out[offset : offset + size])
            offset += size

    def scatter_slab(self, pieces: Sequence[SlabPiece], pages: Pages, data: Bytes) -> None:
        offset = 0
        for piece in pieces:
            size = piece.page_bytes * len(pages)
            self.scatter(piece.buffer, pages, piece.part, data[offset : offset + size])
            offset += size

    def gather(self, buffer: int, pages: Pages, part: TokenSlice | None, out: Bytes) -> None:
        """Copy pages of one buffer to ``out`` [num_pages * bytes], in order."""
        view = self._views[buffer]
        if part is None:
            # "clip", since numpy copies twice to be able to raise, and pages were checked.
            rows = out.reshape(len(pages), view.shape[1])
            np.take(view, pages, axis=0, out=rows, mode="clip")
        else:
            tokens = view.reshape(len(view), -1, part.token_bytes)[:, :, part.low : part.high]
            out.reshape(len(pages), -1, part.num_bytes)[:] = tokens[pages]

    def scatter(self, buffer: int, pages: Pages, part: TokenSlice | None, data: Bytes) -> None:
        """Copy ``data`` into pages of one buffer: the inverse of ``gather``."""
        view = self._views[buffer]
        if part is None:
            view[pages] = data.reshape(len(pages), view.shape[1])
        else:
            tokens = view.reshape(len(view), -1, part.token_bytes)[:, :, part.low : part.high]
            tokens[pages] = data.reshape(len(pages), -1, part.num_bytes)

    def flush(self) -> None:
        """Does nothing: host writes are visible at once."""


def check_pages(buffers: Sequence[Buffer], pages: Pages, who: str) -> None:
    """Raises ``TransferError`` unless every buffer has all of ``pages``. ``who`` named them."""
    if not len(pages):
        return
    low, high = int(pages.min()), int(pages.max())
    for index, buffer in enumerate(buffers):
        num_pages = buffer.num_bytes // buffer.page_bytes
        if low < 0 or high >= num_pages:
            page = low if low < 0 else high
            raise TransferError(
                f"{who} names page {page}, but buffer {index} has pages 0 to {num_pages - 1}."
            )


def one_row(row: int | None) -> Pages:
    """A metadata row as an array of pages, empty for None."""
    return np.array([] if row is None else [row], np.int32)


@dataclass(frozen=True, slots=True)
class Memories:
    """One rank's pools: KV pages, the rows of each state component, and metadata rows."""

    kv: PagedMemory
    states: Sequence[PagedMemory]
    aux: HostMemory

    def enter_thread(self) -> None:
        """The endpoint's thread calls this before all else."""
        for memory in (self.kv, *self.states):
            memory.enter_thread()
