"""What is on its way to one decode rank: the queue of chunks, the credit, the unconfirmed slabs.

A chunk of pages is cut into slabs of about 4 MiB, one per message. Slabs are gathered only
when they can be sent, at most ``window_bytes`` ahead of the receiver's confirmations, so a slow
reader holds up neither memory nor other readers. A slab that did not arrive is gathered again: the
pages stay until the room is confirmed.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from sglang_tiered.codecs.encoded import copied
from sglang_tiered.transfer.layout import are_whole, slab_codec, whole_pieces
from sglang_tiered.transfer.memory import check_pages, one_row
from sglang_tiered.transfer.messages import (
    ENCODED,
    KV_COMPONENT,
    NAMED,
    PLAIN,
    VERSION_FRAME,
    WHERE,
    Last,
    Slab,
)
from sglang_tiered.wire.sockets import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang_tiered.transfer.layout import Pair
    from sglang_tiered.transfer.memory import Bytes, Memories, PagedMemory, Pages, SlabPiece
    from sglang_tiered.transfer.messages import KVLayout, Open
    from sglang_tiered.transfer.same_host import Fence
    from sglang_tiered.wire.keys import Tagger


TARGET_SLAB_BYTES = 4 << 20
"""A frame of this size costs the least processor time per byte."""

SMALL_SLAB_BYTES = 1 << 20
"""A shorter slab takes a buffer of this size, others one of ``TARGET_SLAB_BYTES``. The credit is
charged for the buffer: a queue of short slabs holds no more memory than one of long ones."""

MIN_SLAB_TOKENS = 128
"""A slab holds this many tokens of each of its buffers, or ``TARGET_SLAB_BYTES`` of one, so that
small pages do not become small copies."""

MIN_SAVING = 0.03
"""A slab is sent encoded only if that saves this share of it."""

MAX_RESENDS = 3
MAX_UNCONFIRMED = 2048
"""Messages under way to one decode rank: half of what its socket queues, however small they are."""

NAMED_SHARE = 4
"""Pages that decode reads itself take their bytes divided by this from the credit, since nothing is
buffered for them."""

Key = tuple[int, int, int]  # room, generation, number of the message


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pages of a request that prefill has computed: positions [start, start + len(pages)) of the
    pages decode asked for. The last chunk brings the states and the metadata row.

    ``is_computed`` says whether the pages may be read yet; before, ``pages`` has the right length
    and perhaps not the right numbers, which a device may still be writing. The pages must stay
    allocated until the endpoint reports the room as sent or failed, or is told to fail or drop
    it.
    """

    pages: Pages
    start: int
    is_last: bool
    state_rows: Sequence[Pages | None] = ()
    aux_row: int | None = None
    is_computed: Callable[[], bool] | None = None


class Delivery(NamedTuple):
    """Messages to one decode rank: those of a chunk, or one slab once more."""

    room: int
    fence: Fence  # closed when the pages may go to another request
    parcels: Iterator[Parcel]  # made one by one, once ``is_computed`` allows it
    is_computed: Callable[[], bool] | None = None


@dataclass(eq=False, slots=True)
class Parcel:
    """One message that awaits its confirmation. ``num_bytes`` is its share of the credit;
    ``frames`` are empty once its room is gone. ``buffer`` was borrowed. ``again`` makes the message
    once more, as a slab of the pages' bytes; None for ``Last``."""

    key: Key
    frames: list[Any]
    num_bytes: int
    buffer: Bytes | None = None
    named_bytes: int = 0  # of pages that the receiver reads itself
    again: Callable[[], Iterator[Parcel]] | None = None
    num_resends: int = 0

    @property
    def is_last(self) -> bool:
        return self.again is None


class SlabSpec(NamedTuple):
    """One message of a chunk: pages [start, start + num_pages) of ``num_pairs`` pairs from
    ``first_pair`` on, as one contiguous payload."""

    first_pair: int
    num_pairs: int
    start: int
    num_pages: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SlabSource:
    """Pages of one component of a chunk, from which slabs are cut."""

    component: int
    memory: PagedMemory
    pieces: Sequence[SlabPiece]
    start: int  # of the pages that decode asked for
    pages: Pages
    placed: Any  # ``pages``, as ``memory`` wants them

    def used(self, spec: SlabSpec) -> Sequence[SlabPiece]:
        return self.pieces[spec.first_pair : spec.first_pair + spec.num_pairs]

    def header(self, key: Key, spec: SlabSpec, form: int, payload: Any) -> bytes:
        cut = spec.first_pair, spec.num_pairs, self.start + spec.start, spec.num_pages
        return encode(Slab(*key, self.component, *cut, form, xxhash.xxh3_64_intdigest(payload)))


class SlabBuffers:
    """Keeps buffers of two sizes for reuse: a fresh one costs a page fault per 4 KiB, and beside a
    device a call of its driver. ``allocate`` makes one; ``max_free_bytes`` may be idle, half of
    that of each size."""

    def __init__(
        self, allocate: Callable[[int], Bytes], max_free_bytes: int = 16 * TARGET_SLAB_BYTES
    ) -> None:
        self._allocate = allocate
        self._free: dict[int, list[Bytes]] = {SMALL_SLAB_BYTES: [], TARGET_SLAB_BYTES: []}
        self._max_free_bytes = max_free_bytes // len(self._free)

    def borrow_buffer(self, num_bytes: int) -> Bytes:
        size = next((size for size in self._free if num_bytes <= size), num_bytes)
        free = self._free.get(size)
        return free.pop() if free else self._allocate(size)

    def return_buffer(self, buffer: Bytes) -> None:
        free = self._free.get(buffer.nbytes)
        if free is not None and (len(free) + 1) * buffer.nbytes <= self._max_free_bytes:
            free.append(buffer)


@dataclass(eq=False, slots=True)
class SendQueue:
    """One decode rank's share of a prefill endpoint. The endpoint's thread only."""

    memories: Memories
    pairs: Sequence[Pair]
    layout: KVLayout
    tagger: Tagger
    buffers: SlabBuffers
    credit_bytes: int
    reader: Tagger | None = None  # of messages that name pages, while decode can read this process
    queue: deque[Delivery] = field(default_factory=deque)
    unconfirmed: dict[Key, Parcel] = field(default_factory=dict)
    num_made: Counter[int] = field(default_factory=Counter)  # messages, by room
    quiet_since: float = 0.0
    awaits_compute: bool = False

    def add_chunk(self, opened: Open, chunk: Chunk, fence: Fence) -> None:
        parcels = self._parcels(opened, chunk, fence)
        self.queue.append(Delivery(opened.room, fence, parcels, chunk.is_computed))

    def next_parcel(self) -> Parcel | None:
        """The next message to send, gathered now; None without a message or without credit."""
        self.awaits_compute = False
        while self.queue and self.credit_bytes > 0 and len(self.unconfirmed) < MAX_UNCONFIRMED:
            delivery = self.queue[0]
            if delivery.fence.is_open:
                if delivery.is_computed is not None and not delivery.is_computed():
                    self.awaits_compute = True
                    return None
                parcel = next(delivery.parcels, None)
                # After its pages were read: they may be another request's already.
                if parcel is not None and delivery.fence.is_open:
                    return parcel
            self.queue.popleft()
        return None

    def mark_sent(self, parcel: Parcel, now: float) -> None:
        """Note that a message went out: it is unconfirmed from here on."""
        if not self.unconfirmed:
            self.quiet_since = now
        self.credit_bytes -= parcel.num_bytes
        self.unconfirmed[parcel.key] = parcel

    def confirm(self, key: Key, now: float) -> Parcel | None:
        """Note that a message arrived, or that the receiver has dropped its room. Returns None for
        a message that is not under way."""
        is_oldest = next(iter(self.unconfirmed), None) == key
        parcel = self.unconfirmed.pop(key, None)
        if parcel is None:
            return None
        if is_oldest:  # an overtaken message may be lost, however busy the rest is
            self.quiet_since = now
        self.credit_bytes += parcel.num_bytes
        if parcel.buffer is not None:
            self.buffers.return_buffer(parcel.buffer)
            parcel.buffer = None
        return parcel

    def resend(self, key: Key, fence: Fence | None, now: float) -> bool:
        """Send a message again, which the receiver got and cannot use. ``fence``: of its room, if
        there is one. Returns False if that was tried too often, or is impossible."""
        parcel = self.confirm(key, now)
        if parcel is None or not parcel.frames or fence is None:
            return True
        if parcel.again is None or parcel.num_resends == MAX_RESENDS:
            return False
        if parcel.named_bytes:
            self.reader = None
        self.queue.appendleft(Delivery(key[0], fence, parcel.again()))
        return True

    def drop_room(self, room: int) -> None:
        """Drop what is under way of a room that ended or was confirmed. What is queued goes once
        the room's fence is closed. A message returns its credit with its confirmation: until then
        it takes up memory on one of the sides."""
        self.num_made.pop(room, None)
        for key in [key for key in self.unconfirmed if key[0] == room]:
            parcel = self.unconfirmed[key]
            if parcel.is_last:  # confirmed only for a room that is complete
                del self.unconfirmed[key]
            else:
                parcel.frames, parcel.buffer = [], None

    def _parcels(self, opened: Open, chunk: Chunk, fence: Fence) -> Iterator[Parcel]:
        num_pages = max(0, min(len(chunk.pages), opened.num_pages - chunk.start))
        pages = np.asarray(chunk.pages[:num_pages], np.int32)
        memory = self.memories.kv
        if chunk.is_computed is not None:
            check_pages(memory.buffers, pages)
        pieces = [piece for piece, _ in self.pairs]
        source = SlabSource(KV_COMPONENT, memory, pieces, chunk.start, pages, memory.place(pages))
        if self.reader is not None and memory.is_host and are_whole(self.pairs):
            yield from self._named(opened, source, fence, self.reader)
        else:
            yield from self._slabs(opened, source)
        for component, rows in enumerate(chunk.state_rows if chunk.is_last else ()):
            if rows is not None and len(rows):
                memory = self.memories.states[component]
                pieces, placed = whole_pieces(memory.buffers), memory.place(rows)
                yield from self._slabs(
                    opened, SlabSource(component, memory, pieces, 0, rows, placed)
                )
        if chunk.is_last:
            yield self._last(opened, chunk)

    def _cut(self, opened: Open, source: SlabSource) -> Iterator[tuple[Key, SlabSpec]]:
        page_size = self.layout.page_size if source.component == KV_COMPONENT else 1
        sizes = [piece.page_bytes for piece in source.pieces]
        for spec in cut_slabs(len(source.pages), sizes, page_size):
            yield self._next_key(opened), spec

    def _slabs(self, opened: Open, source: SlabSource) -> Iterator[Parcel]:
        begun = None
        for key, spec in self._cut(opened, source):
            following = self._begin(source, key, spec, 0)
            if begun is not None:  # a device copies the next slab while this one is sent
                yield begun()
            begun = following
        if begun is not None:
            yield begun()

    def _begin(
        self, source: SlabSource, key: Key, spec: SlabSpec, num_resends: int
    ) -> Callable[[], Parcel]:
        """Begin to gather the pages of a slab. Returns what makes its message, once they are
        there."""
        buffer = self.buffers.borrow_buffer(spec.num_bytes)
        payload, pieces = buffer[: spec.num_bytes], source.used(spec)
        placed = source.placed[spec.start : spec.start + spec.num_pages]
        wait = source.memory.begin_gather(pieces, placed, payload)

        def finish() -> Parcel:
            wait()
            data, form = self._encoded(source, spec, payload)
            header = source.header(key, spec, form, data.data)
            frames = [VERSION_FRAME, header, self.tagger.tag(header), data]
            again = partial(self._again, source, key, spec, num_resends + 1)
            if form == PLAIN:
                return Parcel(key, frames, buffer.nbytes, buffer, 0, again, num_resends)
            self.buffers.return_buffer(buffer)  # the pages' bytes are no longer needed
            return Parcel(key, frames, data.nbytes, None, 0, again, num_resends)

        return finish

    def _again(
        self, source: SlabSource, key: Key, spec: SlabSpec, num_resends: int
    ) -> Iterator[Parcel]:
        yield self._begin(source, key, spec, num_resends)()

    def _encoded(self, source: SlabSource, spec: SlabSpec, payload: Bytes) -> tuple[Bytes, int]:
        """What is sent of a slab's bytes, and its form."""
        if source.component == KV_COMPONENT:
            codec = slab_codec(self.layout, source.used(spec), spec.num_pages)
            if codec is not None:
                encoded = copied(codec.encode((payload.data,)))
                if encoded.nbytes <= (1 - MIN_SAVING) * payload.nbytes:
                    return encoded, ENCODED
        return payload, PLAIN

    def _named(
        self, opened: Open, source: SlabSource, fence: Fence, tagger: Tagger
    ) -> Iterator[Parcel]:
        """Messages that say where pages are, for a decode rank that reads this process's memory."""
        for key, spec in self._cut(opened, source):
            part = source.pages[spec.start : spec.start + spec.num_pages]
            payload = WHERE.pack(fence.address, fence.value) + part.astype("<i4").tobytes()
            header = source.header(key, spec, NAMED, payload)
            frames = [VERSION_FRAME, header, tagger.tag(header, payload), payload]
            again, size = partial(self._again, source, key, spec, 1), spec.num_bytes
            yield Parcel(key, frames, size // NAMED_SHARE, named_bytes=size, again=again)

    def _last(self, opened: Open, chunk: Chunk) -> Parcel:
        rows = []
        if chunk.aux_row is not None:
            row = one_row(chunk.aux_row)
            for index, buffer in enumerate(self.memories.aux.buffers):
                out = np.empty(buffer.page_bytes, np.uint8)
                self.memories.aux.gather(index, row, None, out)
                rows.append(out.tobytes())
        key = self._next_key(opened)
        header = encode(Last(*key, rows))
        return Parcel(key, [VERSION_FRAME, header, self.tagger.tag(header)], 0)

    def _next_key(self, opened: Open) -> Key:
        self.num_made[opened.room] += 1
        return opened.room, opened.generation, self.num_made[opened.room] - 1


def cut_slabs(
    num_pages: int,
    page_bytes: Sequence[int],
    page_size: int,
    target_bytes: int = TARGET_SLAB_BYTES,
) -> Iterator[SlabSpec]:
    """Slabs that cover every page of every pair once. ``page_bytes`` has an entry for each pair."""
    if not num_pages or not page_bytes:
        return
    tokens = -(-MIN_SLAB_TOKENS // page_size)
    run = min(num_pages, max(1, min(tokens, target_bytes // max(page_bytes))))
    whole_page = sum(page_bytes)
    if run * whole_page <= target_bytes:  # all buffers fit: lengthen the run instead
        run = min(num_pages, max(run, target_bytes // whole_page))
    for start in range(0, num_pages, run):
        pages = min(run, num_pages - start)
        first = 0
        while first < len(page_bytes):
            end, size = first + 1, pages * page_bytes[first]
            while end < len(page_bytes) and size + pages * page_bytes[end] <= target_bytes:
                size += pages * page_bytes[end]
                end += 1
            yield SlabSpec(first, end - first, start, pages, size)
            first = end
