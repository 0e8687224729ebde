"""The rooms of both ends: which request waits for whom, and where arriving pages may land.

Prefill's room is complete when its request is here (``expect_room``) and every decode rank has
opened it. Either may come first; a decode rank claims a room when its request comes, and opens it
when it has the memory. A failure is remembered for a while, so that the half that comes late learns
it at once. Another request with the number learns it too.

Of what decode receives only the room determines the destination. Its lock is held during each copy
and taken by ``close``. Once ``close`` has returned, nothing that was sent for the room can change a
byte, so its pages can go to the next request at once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import xxhash

from sglang_tiered.errors import CodecError, TransferError
from sglang_tiered.transfer.layout import are_whole, slab_codec, whole_pieces
from sglang_tiered.transfer.memory import one_row
from sglang_tiered.transfer.messages import ENCODED, KV_COMPONENT, NAMED, NOTHING_MORE, WHERE, Open
from sglang_tiered.transfer.same_host import Fence

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from sglang_tiered.config import TransferConfig
    from sglang_tiered.transfer.layout import Pair
    from sglang_tiered.transfer.memory import Bytes, Memories, PagedMemory, Pages, SlabPiece
    from sglang_tiered.transfer.messages import Asked, Claim, KVLayout, Last, Slab
    from sglang_tiered.transfer.same_host import PeerMemory


MAX_TOMBSTONES = 16384

ANOTHER_NUMBER = "draw another bootstrap_room."
"""What a client does whose number is taken. SGLang's router draws one for every try."""

SessionT = TypeVar("SessionT", bound="Hashable")


@dataclass(slots=True)
class TransferStats:
    """What an endpoint did since its start. Written by its thread only."""

    wire_bytes: int = 0  # of slabs sent or received
    same_host_bytes: int = 0  # read by decode out of prefill's memory
    num_slabs: int = 0
    num_damaged: int = 0  # at prefill: sent again
    num_refused: int = 0  # messages of strangers, or that are not authentic
    num_late: int = 0  # of rooms that had ended
    num_rooms_done: int = 0
    num_rooms_failed: int = 0
    num_sessions_lost: int = 0


class Listener(Protocol):
    """Learns how rooms end. Called on the endpoint's thread; must not block."""

    def room_done(self, room: int) -> None:
        """At prefill: every decode rank has confirmed all of it, so its pages may be freed. At
        decode: all pages, states and the metadata row have landed and were verified."""

    def room_failed(self, room: int, reason: str) -> None:
        """It will not be handed over. The ranks of the other side have been told, or are gone."""

    def room_dropped(self, room: int) -> None:
        """``drop_room`` or ``close_room`` was served: no more is said of the room's request."""


@dataclass(eq=False, slots=True)
class SendRoom(Generic[SessionT]):
    """One request's handoff on a prefill rank. ``asks``: what each decode rank said last, a claim
    or the first ``Open``; of those that opened it, once it is ready. ``asked``: what this request
    adds to the model. ``unfinished``: sessions that have not confirmed the whole room. ``fence`` is
    closed before its pages may go to another request."""

    number: int
    created_at: float
    is_expected: bool = False
    is_ready: bool = False
    is_last_queued: bool = False
    asks: dict[SessionT, Claim | Open] = field(default_factory=dict)
    asked: Asked = NOTHING_MORE
    unfinished: set[SessionT] = field(default_factory=set)
    fence: Fence = field(default_factory=Fence)

    @property
    def opens(self) -> dict[SessionT, Open]:
        return {who: said for who, said in self.asks.items() if isinstance(said, Open)}

    @property
    def is_complete(self) -> bool:
        """Whether the request and all decode ranks are here."""
        opens = self.opens
        first = next(iter(opens.values()), None)
        return self.is_expected and first is not None and len(opens) >= first.num_receivers


class RoomTable(Generic[SessionT]):
    """All rooms of one prefill rank. Used by one thread; time is passed in, in seconds."""

    def __init__(self, settings: TransferConfig) -> None:
        self._settings = settings
        self._rooms: dict[int, SendRoom[SessionT]] = {}
        self._tombstones: OrderedDict[int, tuple[float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rooms)

    def __iter__(self) -> Iterator[SendRoom[SessionT]]:
        """Every room there is now; rooms may go meanwhile."""
        return iter(list(self._rooms.values()))

    @property
    def num_orphans(self) -> int:
        """Rooms that wait for a request."""
        return sum(not room.is_expected for room in self._rooms.values())

    def get(self, number: int) -> SendRoom[SessionT] | None:
        return self._rooms.get(number)

    def of_session(self, session: SessionT) -> list[SendRoom[SessionT]]:
        return [room for room in self._rooms.values() if session in room.asks]

    def expect_room(self, number: int, now: float) -> SendRoom[SessionT] | str:
        """Note that a room's request is here. Returns the room, or why it has failed already."""
        reason = self._failure_of(number, now)
        if reason is not None:
            return reason
        room = self._rooms.setdefault(number, SendRoom(number, now))
        room.is_expected = True
        return room

    def claim_room(
        self, session: SessionT, message: Claim | Open, now: float
    ) -> SendRoom[SessionT] | str:
        """Note that a decode rank has the room's request. Returns the room, or why it has failed
        already."""
        number = message.room
        reason = self._failure_of(number, now)
        if reason is not None:
            return reason
        room = self._rooms.get(number)
        if room is None:
            if self.num_orphans >= self._settings.max_orphans:
                return (
                    f"prefill already holds {self.num_orphans} rooms whose requests never came; "
                    "does the router send every request to both?"
                )
            room = self._rooms[number] = SendRoom(number, now)
        if not room.is_ready:
            room.asks.setdefault(session, message)
        return room

    def open_room(self, session: SessionT, message: Open, now: float) -> SendRoom[SessionT] | str:
        """Note that a decode rank has allocated pages. Returns the room, or why it has failed
        already."""
        room = self.claim_room(session, message, now)
        if isinstance(room, str):
            return room
        if not room.is_ready and not isinstance(room.asks[session], Open):
            room.asks[session] = message
        if message != room.asks.get(session):
            # Another rank's room, or another request's, whose pages replace nobody's.
            return f"prefill serves this room number already; {ANOTHER_NUMBER}"
        return room

    def remove_room(self, number: int) -> SendRoom[SessionT] | None:
        """Drop a room that was sent, or whose failure both sides know."""
        return self._rooms.pop(number, None)

    def fail_room(self, number: int, reason: str, now: float) -> SendRoom[SessionT] | None:
        """Drop a room that failed; the half that comes later is told ``reason``."""
        self._tombstones[number] = now, reason
        self._tombstones.move_to_end(number)
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        return self.remove_room(number)

    def overdue(self, now: float) -> list[SendRoom[SessionT]]:
        """The rooms whose other half did not come in time."""
        latest = now - self._settings.orphan_timeout_s
        return [
            room
            for room in self._rooms.values()
            if room.created_at <= latest and not (room.is_expected and room.asks)
        ]

    def _failure_of(self, number: int, now: float) -> str | None:
        while self._tombstones:
            at, _ = next(iter(self._tombstones.values()))
            if now - at < self._settings.tombstone_s:
                break
            self._tombstones.popitem(last=False)
        tombstone = self._tombstones.get(number)
        if tombstone is None:
            return None
        return f"{tombstone[1].rstrip('.')}; for another try, {ANOTHER_NUMBER}"


@dataclass(eq=False, slots=True)
class Progress:
    """What has come from one prefill rank: the numbers of its slabs, and its last word."""

    seen: set[int] = field(default_factory=set)
    highest: int = -1
    last: Last | None = None
    moved_at: float = 0.0

    @property
    def is_complete(self) -> bool:
        return self.last is not None and len(self.seen) >= self.last.num_slabs

    @property
    def has_gap(self) -> bool:
        """Whether a slab is missing that was sent before one that has come."""
        is_behind = self.last is not None or len(self.seen) <= self.highest
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
    memories: Memories
    memory: PagedMemory
    pages: Pages
    state_rows: Sequence[Pages | None]
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
        read. Returns False if its bytes are other than those sent, or cannot be read. A slab of a
        closed room is dropped. Raises ``TransferError`` for a breach of the protocol."""
        memory, pages, used = self._destination(slab, pairs)
        if xxhash.xxh3_64_intdigest(payload) != slab.xxh3:
            return False
        pieces = [piece for _, piece in used]
        size = len(pages) * sum(piece.page_bytes for piece in pieces)
        read: Callable[[], str | None]
        if slab.form == NAMED:
            read = self._reading(slab, payload, used, peer)
        else:
            data = np.frombuffer(payload, np.uint8)
            if slab.form == ENCODED:
                data = _decoded(slab, data, pieces, layout, size)
            if data.nbytes != size:
                raise TransferError(
                    f"prefill sent {data.nbytes} bytes for {len(pages)} pages that take {size}."
                )
            for event in self.after:
                event.synchronize()  # without the lock, for which the scheduler may wait
            self.after = ()
            read = partial(memory.scatter_slab, pieces, pages, data)
        with self._lock:
            if self.is_closed or self.is_concluded:
                return True
            problem = read()
        if problem is None and slab.component == KV_COMPONENT:
            self.kv_bytes += size
        return problem is None

    def _reading(
        self, slab: Slab, payload: Any, used: Sequence[Pair], peer: PeerMemory | None
    ) -> Callable[[], str | None]:
        """What reads the pages that a slab names out of the sender's memory."""
        if peer is None or slab.component != KV_COMPONENT:
            raise TransferError("prefill offers memory that this instance cannot read.")
        if not are_whole(used):
            raise TransferError("prefill asks decode to read parts of pages, which it cannot.")
        pages = self.pages[slab.start : slab.start + slab.num_pages]
        if len(payload) != WHERE.size + 4 * len(pages):
            raise TransferError(f"prefill named other than {len(pages)} pages to read.")
        fence = WHERE.unpack_from(payload)
        source = np.frombuffer(payload, "<i4", offset=WHERE.size).astype(np.int32)
        buffers = [(one.buffer, self.memory.buffers[other.buffer]) for one, other in used]
        return partial(peer.pull, buffers, source, pages, fence)

    def finish(self, last: Last, progress: Progress) -> None:
        """Note what ``Last`` says of one sender. Raises ``TransferError`` for rows of another
        shape."""
        sizes = [buffer.page_bytes for buffer in self.memories.aux.buffers]
        if last.aux and [len(row) for row in last.aux] != sizes:
            raise TransferError("prefill sent metadata rows of other sizes than decode's.")
        progress.last = last

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
        lasts = (item.last for item in self.progress.values())
        rows = next((last.aux for last in lasts if last is not None and last.aux), ())
        self.memory.flush()
        for memory in self.memories.states:
            memory.flush()
        with self._lock:
            if self.is_closed:
                return False
            if self.aux_row is not None:
                aux, target = self.memories.aux, one_row(self.aux_row)
                for index, row in enumerate(rows):
                    aux.scatter(index, target, None, np.frombuffer(row, np.uint8))
            self.is_concluded = True
        return True

    def _destination(
        self, slab: Slab, pairs: Sequence[Pair]
    ) -> tuple[PagedMemory, Pages, Sequence[Pair]]:
        memory, pages, component = self.memory, self.pages, slab.component
        if component != KV_COMPONENT:
            if not 0 <= component < len(self.state_rows):
                raise TransferError(f"prefill sent state {component} of {len(self.state_rows)}.")
            memory, rows = self.memories.states[component], self.state_rows[component]
            pages = one_row(None) if rows is None else rows
            pairs = [(piece, piece) for piece in whole_pieces(memory.buffers)]
        end, last_pair = slab.start + slab.num_pages, slab.first_pair + slab.num_pairs
        if not (0 <= slab.start < end <= len(pages)):
            raise TransferError(
                f"prefill sent pages {slab.start} to {end} of a room of {len(pages)}."
            )
        if not (0 <= slab.first_pair < last_pair <= len(pairs)):
            raise TransferError(
                f"prefill sent buffers {slab.first_pair} to {last_pair} of {len(pairs)}."
            )
        return memory, pages[slab.start : end], pairs[slab.first_pair : last_pair]


def _decoded(
    slab: Slab, data: Bytes, pieces: Sequence[SlabPiece], layout: KVLayout, num_bytes: int
) -> Bytes:
    codec = None
    if slab.component == KV_COMPONENT:
        codec = slab_codec(layout, pieces, slab.num_pages)
    if codec is None:
        raise TransferError("prefill encodes what decode takes as it is.")
    plain = np.empty(num_bytes, np.uint8)
    try:
        codec.decode(data.data, (plain.data,))
    except CodecError as error:
        raise TransferError(f"prefill sent a slab that no codec made: {error}.") from error
    return plain
