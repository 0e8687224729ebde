"""The rooms of a decode endpoint: where arriving pages go, and until when they may land.

Only the room determines a destination. Its lock is held during each copy and taken by ``close``.
Once ``close`` has returned, nothing that was sent for the room can change a byte, so its pages can
go to the next request at once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from sglang_tiered.errors import CodecError, TransferError
from sglang_tiered.transfer.layout import slab_codec, whole_pairs
from sglang_tiered.transfer.messages import ENCODED, KV_COMPONENT, NAMED, WHERE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.transfer.layout import Pair
    from sglang_tiered.transfer.memory import Bytes, HostMemory, PagedMemory, Pages
    from sglang_tiered.transfer.messages import KVLayout, Last, Slab
    from sglang_tiered.transfer.same_host import PeerMemory


class DamagedError(TransferError):
    """A slab arrived with other bytes than were sent."""


@dataclass(eq=False, slots=True)
class Progress:
    """What has come from one prefill rank: the numbers of its slabs, and how many there will be."""

    seen: set[int] = field(default_factory=set)
    highest: int = -1
    num_slabs: int | None = None
    aux: Sequence[bytes] = ()
    moved_at: float = 0.0

    @property
    def is_complete(self) -> bool:
        return self.num_slabs is not None and len(self.seen) >= self.num_slabs

    @property
    def has_gap(self) -> bool:
        """Whether a slab is missing that was sent before one that has come."""
        is_behind = self.num_slabs is not None or len(self.seen) <= self.highest
        return not self.is_complete and is_behind

    def mark(self, seq: int, now: float) -> None:
        self.seen.add(seq)
        self.highest = max(self.highest, seq)
        self.moved_at = now


@dataclass(eq=False, slots=True)
class ReceiveRoom:
    """One request's destination on this decode rank: its pages, in the order prefill sends them.

    ``memory`` is the device's pool or the host tier's. ``links``: the sessions of the prefill ranks
    that were asked; ``progress`` is by them.
    """

    number: int
    generation: int
    memory: PagedMemory
    pages: Pages
    states: Sequence[tuple[PagedMemory, Pages | None]]
    aux: HostMemory
    aux_row: int | None
    links: Sequence[Any] = ()
    progress: dict[Any, Progress] = field(default_factory=dict)
    num_expected: int = 0  # prefill ranks that send something
    after: Sequence[Any] = ()  # events of the device, before which no page is written
    is_closed: bool = False
    is_concluded: bool = False
    kv_bytes: int = 0  # landed so far
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """Let nothing land from here on. Any thread; waits for at most one copy of a slab."""
        with self._lock:
            self.is_closed = True

    def land(
        self,
        slab: Slab,
        payload: Any,
        pairs: Sequence[Pair],
        layout: KVLayout,
        peer: PeerMemory | None = None,
    ) -> bool:
        """Check a slab and copy it in; ``peer`` is the memory of who sent it, where that may be
        read. Returns False if the room is closed. Raises ``DamagedError`` for bytes other than
        those sent, or that cannot be read, ``TransferError`` for a breach of the protocol."""
        memory, pages, used = self._destination(slab, pairs)
        if xxhash.xxh3_64_intdigest(payload) != slab.xxh3:
            raise DamagedError(f"slab {slab.seq} of room {self.number} arrived damaged.")
        size = len(pages) * sum(pair.page_bytes for pair in used)
        if slab.form == NAMED:
            landed = self._read(slab, payload, used, peer)
        else:
            data = np.frombuffer(payload, np.uint8)
            if slab.form == ENCODED:
                data = _decoded(slab, data, used, layout, size)
            if data.nbytes != size:
                raise TransferError(
                    f"prefill sent {data.nbytes} bytes for {len(pages)} pages that take {size}."
                )
            for event in self.after:
                event.synchronize()  # without the lock, for which the scheduler may wait
            self.after = ()
            with self._lock:
                landed = not self.is_closed and not self.is_concluded
                if landed:
                    pieces = [pair.destination_piece for pair in used]
                    memory.scatter_slab(pieces, pages, data)
        self.kv_bytes += size if landed and slab.component == KV_COMPONENT else 0
        return landed

    def _read(
        self, slab: Slab, payload: Any, used: Sequence[Pair], peer: PeerMemory | None
    ) -> bool:
        """Read the pages that a slab names out of the sender's memory."""
        if peer is None or slab.component != KV_COMPONENT:
            raise TransferError("prefill offers memory that this instance cannot read.")
        if any(pair.source_slice or pair.destination_slice for pair in used):
            raise TransferError("prefill asks decode to read parts of pages, which it cannot.")
        pages = self.pages[slab.start : slab.start + slab.num_pages]
        if len(payload) != WHERE.size + 4 * len(pages):
            raise TransferError(f"prefill named other than {len(pages)} pages to read.")
        fence = WHERE.unpack_from(payload)
        source = np.frombuffer(payload, "<i4", offset=WHERE.size).astype(np.int32)
        buffers = [(pair.source, self.memory.buffers[pair.destination]) for pair in used]
        with self._lock:
            if self.is_closed or self.is_concluded:
                return False
            problem = peer.pull(buffers, source, pages, fence)
        if problem is not None:
            raise DamagedError(f"reading prefill's memory on this machine failed ({problem}).")
        return True

    def finish(self, last: Last, progress: Progress) -> None:
        """Note what ``Last`` says of one sender. Raises ``TransferError`` for rows of another
        shape."""
        sizes = [buffer.page_bytes for buffer in self.aux.buffers]
        if last.aux and [len(row) for row in last.aux] != sizes:
            raise TransferError("prefill sent metadata rows of other sizes than decode's.")
        progress.num_slabs = last.num_slabs
        progress.aux = last.aux

    def conclude(self) -> bool:
        """Write the metadata row once every rank's slabs are here; then the request may start.
        Returns True the one time that this happens. Raises ``TransferError`` when all ranks have
        sent ``Last`` and yet a layer, head or page is missing."""
        if self.is_concluded or len(self.progress) < self.num_expected:
            return False
        if not all(progress.is_complete for progress in self.progress.values()):
            return False
        expected = len(self.pages) * sum(buffer.page_bytes for buffer in self.memory.buffers)
        if self.kv_bytes != expected:
            raise TransferError(
                f"prefill sent {self.kv_bytes} bytes of KV for pages that hold {expected}."
            )
        rows = next((item.aux for item in self.progress.values() if item.aux), ())
        self.memory.flush()
        for memory, _ in self.states:
            memory.flush()
        with self._lock:
            if self.is_closed:
                return False
            if self.aux_row is not None:
                target = np.array([self.aux_row], np.int32)
                for index, row in enumerate(rows):
                    self.aux.scatter(index, target, None, np.frombuffer(row, np.uint8))
            self.is_concluded = True
        return True

    def _destination(
        self, message: Slab, pairs: Sequence[Pair]
    ) -> tuple[PagedMemory, Pages, Sequence[Pair]]:
        memory, pages, component = self.memory, self.pages, message.component
        if component != KV_COMPONENT:
            if not 0 <= component < len(self.states):
                raise TransferError(f"prefill sent state {component} of {len(self.states)}.")
            memory, rows = self.states[component]
            pages = np.empty(0, np.int32) if rows is None else rows
            pairs = whole_pairs(memory.buffers)
        end, last_pair = message.start + message.num_pages, message.first_pair + message.num_pairs
        if not (0 <= message.start < end <= len(pages)):
            raise TransferError(
                f"prefill sent pages {message.start} to {end} of a room of {len(pages)}."
            )
        if not (0 <= message.first_pair < last_pair <= len(pairs)):
            raise TransferError(
                f"prefill sent buffers {message.first_pair} to {last_pair} of {len(pairs)}."
            )
        return memory, pages[message.start : end], pairs[message.first_pair : last_pair]


def _decoded(
    slab: Slab, data: Bytes, used: Sequence[Pair], layout: KVLayout, num_bytes: int
) -> Bytes:
    codec = None
    if slab.component == KV_COMPONENT:
        codec = slab_codec(layout, used, slab.num_pages)
    if codec is None:
        raise TransferError("prefill encodes what decode takes as it is.")
    plain = np.empty(num_bytes, np.uint8)
    try:
        codec.decode(data.data, (plain.data,))
    except CodecError as error:
        raise TransferError(f"prefill sent a slab that no codec made: {error}.") from error
    return plain
