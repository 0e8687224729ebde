"""What is on its way to one decode rank: the queue of chunks, the credit, the unconfirmed slabs.

A chunk of pages is cut into slabs of about 4 MiB, one per message. Slabs are gathered only
when they can be sent, at most ``window_bytes`` ahead of the receiver's confirmations, so a slow
reader holds up neither memory nor other readers.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from sglang_tiered.transfer.layout import whole_pairs
from sglang_tiered.transfer.memory import check_pages
from sglang_tiered.transfer.messages import KV_COMPONENT, VERSION_FRAME, Last, Pull, Slab
from sglang_tiered.transfer.same_host import MAX_PULL_BYTES
from sglang_tiered.transfer.wire_codec import PLAIN
from sglang_tiered.wire.sockets import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang_tiered.transfer.layout import Pair
    from sglang_tiered.transfer.memory import Bytes, Memories, PagedMemory, Pages
    from sglang_tiered.transfer.messages import Open
    from sglang_tiered.transfer.same_host import Fence
    from sglang_tiered.transfer.wire_codec import WireCodec
    from sglang_tiered.wire.keys import Tagger

__all__ = [
    "PULL_SHARE",
    "SMALL_SLAB_BYTES",
    "TARGET_SLAB_BYTES",
    "Chunk",
    "Delivery",
    "Parcel",
    "SendQueue",
    "SlabBuffers",
    "SlabSpec",
    "cut_slabs",
]

TARGET_SLAB_BYTES = 4 << 20
"""A frame of this size costs the least processor time per byte."""

SMALL_SLAB_BYTES = 1 << 20
"""A shorter slab takes a buffer of this size, others one of ``TARGET_SLAB_BYTES``. The credit is
charged for the buffer: a queue of short slabs holds no more memory than one of long ones."""

MIN_SLAB_TOKENS = 128
"""A slab holds this many tokens of each of its buffers, or ``TARGET_SLAB_BYTES`` of one, so that
small pages do not become small copies."""

MAX_RESENDS = 3
MAX_UNCONFIRMED = 2048
"""Messages under way to one decode rank: half of what its socket queues, however small they are."""

PULL_SHARE = 4
"""A pull takes its bytes divided by this from the credit, since nothing is buffered for it."""


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


@dataclass(eq=False, slots=True)
class Parcel:
    """One message that awaits its confirmation. ``num_bytes`` is its share of the credit;
    ``frames`` are empty once its room is gone. ``is_lent`` says that ``buffer`` goes back to where
    it was borrowed. ``as_slab`` sends the same pages once a pull of them failed."""

    key: tuple[int, int, int]
    frames: list[Any]
    num_bytes: int
    buffer: Bytes | None = None
    is_lent: bool = False
    num_resends: int = 0
    is_last: bool = False
    as_slab: Delivery | None = None


@dataclass(eq=False, slots=True)
class Delivery:
    """A chunk on its way to one decode rank."""

    opened: Open
    chunk: Chunk
    fence: Fence
    parcels: Iterator[Parcel] | None = None


@dataclass(slots=True)
class RoomShare:
    """What of a queue is one room's, so that the end of a room costs only its own messages."""

    deliveries: list[Delivery] = field(default_factory=list)
    unconfirmed: set[tuple[int, int, int]] = field(default_factory=set)
    num_sent: dict[int, int] = field(default_factory=dict)  # by generation


@dataclass(eq=False, slots=True)
class Gathering:
    """A slab whose pages are on their way into its buffer; ``wait`` returns once they are there."""

    key: tuple[int, int, int]
    spec: SlabSpec
    used: Sequence[Pair]
    buffer: Bytes
    wait: Callable[[], None]


@dataclass(frozen=True, slots=True)
class SlabSpec:
    """One message of a chunk: pages [start, start + num_pages) of ``num_pairs`` pairs from
    ``first_pair`` on, as one contiguous payload."""

    first_pair: int
    num_pairs: int
    start: int
    num_pages: int
    num_bytes: int


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
    page_size: int
    tagger: Tagger
    buffers: SlabBuffers
    credit_bytes: int
    codec: WireCodec | None = None
    pull_tagger: Tagger | None = None  # while the receiver can read this process's memory
    queue: deque[Delivery] = field(default_factory=deque)
    unconfirmed: dict[tuple[int, int, int], Parcel] = field(default_factory=dict)
    rooms: defaultdict[int, RoomShare] = field(default_factory=lambda: defaultdict(RoomShare))
    returned: deque[Parcel] = field(default_factory=deque)  # to be sent again
    quiet_since: float = 0.0
    awaits_compute: bool = False

    def add_chunk(self, opened: Open, chunk: Chunk, fence: Fence) -> None:
        delivery = Delivery(opened, chunk, fence)
        self.queue.append(delivery)
        self.rooms[opened.room].deliveries.append(delivery)

    def next_parcel(self) -> Parcel | None:
        """The next message to send, gathered now; None without a message or without credit."""
        self.awaits_compute = False
        if self.returned:
            return self.returned.popleft()
        while self.queue and self.credit_bytes > 0 and len(self.unconfirmed) < MAX_UNCONFIRMED:
            delivery = self.queue[0]
            if delivery.parcels is None:
                is_computed = delivery.chunk.is_computed
                if is_computed is not None and not is_computed():
                    self.awaits_compute = True
                    return None
                delivery.parcels = self._parcels(delivery)
            parcel = next(delivery.parcels, None)
            if parcel is not None:
                return parcel
            self.queue.popleft()
            self.rooms[delivery.opened.room].deliveries.remove(delivery)
        return None

    def mark_sent(self, parcel: Parcel, now: float) -> None:
        """Note that a message went out: it is unconfirmed from here on."""
        if not self.unconfirmed:
            self.quiet_since = now
        if parcel.key not in self.unconfirmed:
            self.credit_bytes -= parcel.num_bytes
            self.unconfirmed[parcel.key] = parcel
            self.rooms[parcel.key[0]].unconfirmed.add(parcel.key)

    def confirm(self, key: tuple[int, int, int], now: float) -> Parcel | None:
        """Note that a message arrived, or that the receiver has dropped its room. Returns None for
        a message that is not under way."""
        is_oldest = next(iter(self.unconfirmed), None) == key
        parcel = self.unconfirmed.pop(key, None)
        if parcel is None:
            return None
        share = self.rooms.get(key[0])
        if share is not None:
            share.unconfirmed.discard(key)
        if is_oldest:  # an overtaken message may be lost, however busy the rest is
            self.quiet_since = now
        self.credit_bytes += parcel.num_bytes
        if parcel.is_lent and parcel.buffer is not None and not parcel.num_resends:
            self.buffers.return_buffer(parcel.buffer)
        parcel.buffer = None
        return parcel

    def resend(self, key: tuple[int, int, int], now: float) -> bool:
        """Send a message again. Returns False if that was tried too often, or is impossible."""
        parcel = self.unconfirmed.get(key)
        if parcel is None:
            return True
        if not parcel.frames:
            self.confirm(key, now)
            return True
        if parcel.as_slab is not None:  # a buffer takes more credit than a pull did
            self.pull_tagger = None
            self.confirm(key, now)
            self.queue.appendleft(parcel.as_slab)
            self.rooms[key[0]].deliveries.append(parcel.as_slab)
            return True
        parcel.num_resends += 1
        if parcel.num_resends > MAX_RESENDS or parcel.buffer is None:
            self.confirm(key, now)  # it was received, so its credit is free
            return False
        self.returned.append(parcel)
        return True

    def drop_room(self, room: int) -> None:
        """Drop the messages of a room that wait. A message under way returns its credit with its
        confirmation: until then it takes up memory on one of the sides."""
        share = self.rooms.pop(room, None)
        if share is None:
            return
        for delivery in share.deliveries:
            self.queue.remove(delivery)
        for parcel in [parcel for parcel in self.returned if parcel.key[0] == room]:
            self.returned.remove(parcel)
            if self.unconfirmed.pop(parcel.key, None) is not None:
                self.credit_bytes += parcel.num_bytes
                share.unconfirmed.discard(parcel.key)
        for key in share.unconfirmed:
            parcel = self.unconfirmed[key]
            if parcel.is_last:  # confirmed only for a room that is complete
                del self.unconfirmed[key]
            else:
                parcel.frames, parcel.buffer, parcel.as_slab = [], None, None

    def _parcels(self, delivery: Delivery) -> Iterator[Parcel]:
        opened, chunk = delivery.opened, delivery.chunk
        num_pages = max(0, min(len(chunk.pages), opened.num_pages - chunk.start))
        pages = np.asarray(chunk.pages[:num_pages], np.int32)
        if chunk.is_computed is not None:
            check_pages(self.memories.kv, pages, "the scheduler")
        tagger = self.pull_tagger
        if tagger is not None and self.memories.kv.is_host and _are_whole(self.pairs):
            parcels = self._pulls(delivery, pages, tagger)
        else:
            parcels = self._slabs(
                opened, KV_COMPONENT, self.memories.kv, self.pairs, chunk.start, pages
            )
        yield from _while_open(delivery.fence, parcels)
        if not chunk.is_last:
            return
        for component, rows in enumerate(chunk.state_rows):
            if rows is not None and len(rows):
                memory = self.memories.states[component]
                parcels = self._slabs(
                    opened, component, memory, whole_pairs(memory.buffers), 0, rows
                )
                yield from _while_open(delivery.fence, parcels)
        yield from _while_open(delivery.fence, iter([self._last(opened, chunk)]))

    def _slabs(
        self,
        opened: Open,
        component: int,
        memory: PagedMemory,
        pairs: Sequence[Pair],
        start: int,
        pages: Pages,
    ) -> Iterator[Parcel]:
        sizes = [pair.page_bytes for pair in pairs]
        page_size = self.page_size if component == KV_COMPONENT else 1
        placed = memory.place(pages)
        begun = None
        for spec in cut_slabs(len(pages), sizes, page_size):
            key, buffer = self._next_key(opened), self.buffers.borrow_buffer(spec.num_bytes)
            following = self._begin(key, memory, pairs, spec, placed, buffer)
            if begun is not None:  # a device copies the next slab while this one is sent
                yield self._slab_parcel(begun, component, start)
            begun = following
        if begun is not None:
            yield self._slab_parcel(begun, component, start)

    def _begin(
        self,
        key: tuple[int, int, int],
        memory: PagedMemory,
        pairs: Sequence[Pair],
        spec: SlabSpec,
        placed: Any,
        buffer: Bytes,
    ) -> Gathering:
        """Begin to gather a slab of the chunk whose pages are ``placed`` into ``buffer``."""
        used = pairs[spec.first_pair : spec.first_pair + spec.num_pairs]
        pieces = [pair.source_piece for pair in used]
        part = placed[spec.start : spec.start + spec.num_pages]
        wait = memory.begin_gather(pieces, part, buffer[: spec.num_bytes])
        return Gathering(key, spec, used, buffer, wait)

    def _slab_parcel(self, begun: Gathering, component: int, start: int) -> Parcel:
        frames, buffer = self._slab(begun, component, start), begun.buffer
        payload: Bytes = frames[-1]
        if payload.base is buffer:
            return Parcel(begun.key, frames, buffer.nbytes, buffer, is_lent=True)
        self.buffers.return_buffer(buffer)  # encoded: the pages' bytes are no longer needed
        return Parcel(begun.key, frames, payload.nbytes, payload)

    def _slab(self, begun: Gathering, component: int, start: int) -> list[Any]:
        """The frames of a slab, once its pages are in its buffer."""
        spec, used = begun.spec, begun.used
        begun.wait()
        payload = begun.buffer[: spec.num_bytes]
        number = PLAIN
        if self.codec is not None and component == KV_COMPONENT:
            encoded = self.codec.encode(payload, used, spec.num_pages)
            if encoded is not None:
                payload, number = encoded, self.codec.number
        header = encode(
            Slab(
                *begun.key,
                component,
                spec.first_pair,
                spec.num_pairs,
                start + spec.start,
                spec.num_pages,
                number,
                spec.num_bytes,
                xxhash.xxh3_64_intdigest(payload.data),
            )
        )
        return [VERSION_FRAME, header, self.tagger.tag(header), payload]

    def _pulls(self, delivery: Delivery, pages: Pages, tagger: Tagger) -> Iterator[Parcel]:
        start, fence = delivery.chunk.start, delivery.fence
        sizes = [pair.page_bytes for pair in self.pairs]
        for spec in cut_slabs(len(pages), sizes, self.page_size, MAX_PULL_BYTES):
            key = self._next_key(delivery.opened)
            header = encode(
                Pull(
                    *key,
                    spec.first_pair,
                    spec.num_pairs,
                    start + spec.start,
                    spec.num_pages,
                    fence.address,
                    fence.value,
                )
            )
            part = pages[spec.start : spec.start + spec.num_pages]
            numbers = part.astype("<i4").tobytes()
            frames = [VERSION_FRAME, header, tagger.tag(header, numbers), numbers]
            parcel = Parcel(key, frames, spec.num_bytes // PULL_SHARE)
            instead = _while_open(fence, self._instead_of_pull(key, spec, start, pages))
            parcel.as_slab = replace(delivery, parcels=instead)
            yield parcel

    def _instead_of_pull(
        self, key: tuple[int, int, int], spec: SlabSpec, start: int, pages: Pages
    ) -> Iterator[Parcel]:
        """The pages that the receiver could not read, as a slab."""
        memory = self.memories.kv
        buffer = self.buffers.borrow_buffer(spec.num_bytes)
        begun = self._begin(key, memory, self.pairs, spec, memory.place(pages), buffer)
        yield self._slab_parcel(begun, KV_COMPONENT, start)

    def _last(self, opened: Open, chunk: Chunk) -> Parcel:
        rows = []
        if chunk.aux_row is not None:
            row = np.array([chunk.aux_row], np.int32)
            for index, buffer in enumerate(self.memories.aux.buffers):
                out = np.empty(buffer.page_bytes, np.uint8)
                self.memories.aux.gather(index, row, None, out)
                rows.append(out.tobytes())
        key = self._next_key(opened)
        header = encode(Last(key[0], key[1], key[2], rows))
        return Parcel(key, [VERSION_FRAME, header, self.tagger.tag(header)], 0, is_last=True)

    def _next_key(self, opened: Open) -> tuple[int, int, int]:
        num_sent = self.rooms[opened.room].num_sent
        number = num_sent.get(opened.generation, 0)
        num_sent[opened.generation] = number + 1
        return opened.room, opened.generation, number


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


def _while_open(fence: Fence, parcels: Iterator[Parcel]) -> Iterator[Parcel]:
    """Stops when a room is closed while its pages are read: they may go to another request."""
    for parcel in parcels:
        if not fence.is_open:
            return
        yield parcel


def _are_whole(pairs: Sequence[Pair]) -> bool:
    return all(pair.source_slice is None and pair.destination_slice is None for pair in pairs)
