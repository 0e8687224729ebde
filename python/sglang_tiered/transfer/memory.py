"""Access to pages: gather out of and scatter into the buffers of a KV pool.

``HostMemory`` serves pools in ordinary memory (SGLang on a CPU, and SGLang's host pool), and
``integration`` those of devices.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


Pages = np.ndarray[Any, np.dtype[np.int32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Buffer:
    """One contiguous buffer of pages, not owned: address, size, and bytes of one page."""

    address: int
    num_bytes: int
    page_bytes: int

    @property
    def num_pages(self) -> int:
        return self.num_bytes // self.page_bytes


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


class PagedMemory:
    """The pages of one pool. Called on the endpoint's thread only, with page numbers that have
    passed ``check_pages``. What is here is right for memory that all threads see alike."""

    is_host = True
    """Whether another process of this machine could read the buffers."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = tuple(buffers)

    def enter_thread(self) -> None:
        """The endpoint's thread calls this before all else."""

    def new_buffer(self, num_bytes: int) -> Bytes:
        """Host memory that a slab is best gathered into; freed with its last reference."""
        return np.empty(num_bytes, np.uint8)

    def place(self, pages: Pages) -> Any:
        """The numbers of a chunk's pages where ``begin_gather`` reads them: once for all slabs of
        the chunk. Can be sliced as ``pages`` can."""
        return pages

    def begin_gather(
        self, pieces: Sequence[SlabPiece], placed: Any, out: Bytes
    ) -> Callable[[], None]:
        """Begin to copy pages to ``out``: one piece after the other, in each the pages in order.
        Filled once the returned call has returned; until then ``out`` must not be used for
        something else. The pages must have been computed."""
        raise NotImplementedError

    def scatter_slab(self, pieces: Sequence[SlabPiece], pages: Pages, data: Bytes) -> None:
        """Copy ``data`` into pages, the inverse of a gather; ``data`` is free on return."""
        raise NotImplementedError

    def flush(self) -> None:
        """Wait until everything scattered so far may be read."""


class HostMemory(PagedMemory):
    """Buffers in this process's memory, by address. The caller keeps the pool alive."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        super().__init__(buffers)
        self._views = []
        for buffer in self.buffers:
            shape = buffer.num_pages, buffer.page_bytes
            memory: Any = (ctypes.c_ubyte * (shape[0] * shape[1])).from_address(buffer.address)
            self._views.append(np.frombuffer(memory, np.uint8).reshape(shape))

    def begin_gather(
        self, pieces: Sequence[SlabPiece], placed: Pages, out: Bytes
    ) -> Callable[[], None]:
        """Copies when it is waited for: nothing else would do it meanwhile."""

        def gather() -> None:
            for piece, part in _parts(pieces, placed, out):
                self.gather(piece.buffer, placed, piece.part, part)

        return gather

    def scatter_slab(self, pieces: Sequence[SlabPiece], pages: Pages, data: Bytes) -> None:
        for piece, part in _parts(pieces, pages, data):
            self.scatter(piece.buffer, pages, piece.part, part)

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


def _parts(
    pieces: Sequence[SlabPiece], pages: Pages, data: Bytes
) -> Iterator[tuple[SlabPiece, Bytes]]:
    """Each piece of a slab with its bytes."""
    start = 0
    for piece in pieces:
        end = start + piece.page_bytes * len(pages)
        yield piece, data[start:end]
        start = end


def check_pages(buffers: Sequence[Buffer], pages: Pages, who: str = "the scheduler") -> None:
    """Raises ``TransferError`` unless every buffer has all of ``pages``. ``who`` named them."""
    if not len(pages):
        return
    low, high = int(pages.min()), int(pages.max())
    for index, buffer in enumerate(buffers):
        if low < 0 or high >= buffer.num_pages:
            raise TransferError(
                f"{who} names page {low if low < 0 else high}, but buffer {index} has pages 0 to "
                f"{buffer.num_pages - 1}."
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

    def count_rows(self, state_rows: Sequence[Pages | None], aux_row: int | None) -> list[int]:
        """The number of rows of each state. Raises ``TransferError`` for rows that the states or
        the metadata do not have."""
        check_pages(self.aux.buffers, one_row(aux_row))
        counts = []
        for memory, rows in zip_longest(self.states, state_rows[: len(self.states)]):
            if rows is not None:
                check_pages(memory.buffers, rows)
            counts.append(0 if rows is None else len(rows))
        return counts
