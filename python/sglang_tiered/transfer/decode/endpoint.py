"""The decode end: opens rooms at prefill ranks and copies what they send into its pages.

Connects to both sockets of each prefill rank and binds nothing, so a decode host needs no open
port. All state except the rooms' fences belongs to one thread; results come back through
``DecodeListener`` on that thread.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sglang_tiered.errors import TransferError
from sglang_tiered.transfer import messages
from sglang_tiered.transfer.decode.rooms import DamagedError, Progress, ReceiveRoom
from sglang_tiered.transfer.decode.sessions import PrefillLinks
from sglang_tiered.transfer.memory import check_pages, one_row
from sglang_tiered.transfer.messages import NOTHING_MORE
from sglang_tiered.wire import sockets
from sglang_tiered.wire.loop import EndpointLoop
from sglang_tiered.wire.sockets import received

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import zmq

    from sglang_tiered.config import TransferConfig
    from sglang_tiered.transfer.decode.sessions import Address, PrefillLink
    from sglang_tiered.transfer.memory import Memories, PagedMemory, Pages
    from sglang_tiered.transfer.messages import Asked, KVLayout
    from sglang_tiered.wire.keys import Keys


logger = logging.getLogger(__name__)

MAX_DATA_MESSAGES = 4
"""Slabs handled before the control sockets are polled again: about 16 MiB, a few ms."""


@dataclass(frozen=True, slots=True)
class DecodeTarget:
    """A prefill rank of a room. A dummy takes part, but sends nothing (replicated KV)."""

    address: Address
    is_dummy: bool = False


@dataclass(slots=True)
class DecodeStats:
    """Counters since the start. Written by the endpoint's thread only."""

    received_bytes: int = 0
    pulled_bytes: int = 0
    num_slabs: int = 0
    num_damaged: int = 0
    num_late: int = 0
    num_forged: int = 0
    num_rooms_received: int = 0
    num_rooms_failed: int = 0
    num_sessions_lost: int = 0


class DecodeListener(Protocol):
    """Learns how rooms end. Called on the endpoint's thread; must not block."""

    def room_received(self, room: int) -> None:
        """All pages, states and the metadata row have landed and were verified."""

    def room_failed(self, room: int, reason: str) -> None:
        """The room will not be completed. Its prefill ranks have been told, or are gone."""

    def room_dropped(self, room: int) -> None:
        """``close_room`` was served: nothing more is said of the room's request."""

    def prefill_lost(self, address: Address, reason: str) -> None:
        """A session ended. Its rooms have failed; the next room connects anew."""


class DecodeEndpoint:
    """Methods may be called on any thread and return at once; ``close`` ends it. ``server``: where
    this instance answers requests, to be named to prefill. ``on_tick`` is called a few times a
    second on the endpoint's thread. Prefill hears of no room before ``set_model``."""

    def __init__(
        self,
        *,
        server: str,
        layout: KVLayout,
        memories: Memories,
        listener: DecodeListener,
        settings: TransferConfig,
        keys: Keys | None = None,
        on_tick: Callable[[DecodeEndpoint], None] = lambda _: None,
    ) -> None:
        self._memories = memories
        self._layout = layout
        self._listener = listener
        self._settings = settings
        self._on_tick = on_tick
        self._generations = itertools.count(1)
        self._table_lock = threading.Lock()
        self._rooms: dict[int, ReceiveRoom] = {}
        self._model: bytes | None = None  # of the KV that is taken
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # until it is known
        self.stats = DecodeStats()
        self._loop = EndpointLoop("kv-transfer-decode", lambda: None, self._tick)
        self._links = PrefillLinks(
            server=server,
            layout=layout,
            settings=settings,
            keys=keys,
            loop=self._loop,
            on_failed=self._on_failed,
            on_data=self._on_data,
            on_lost=self._on_lost,
        )
        self._loop.call(memories.enter_thread)
        self._loop.start()

    @property
    def num_rooms(self) -> int:
        return len(self._rooms)

    @property
    def num_sessions(self) -> int:
        return len(self._links)

    def set_model(self, model: bytes | None) -> None:
        """Name the model (``messages.Open``) whose KV is taken from now on. None: prefill hears of
        no room until it is known. Close the rooms of another model yourself."""
        self._loop.call(self._set_model, model)

    def claim_room(
        self, room: int, targets: Sequence[DecodeTarget], asked: Asked = NOTHING_MORE
    ) -> None:
        """Tell prefill that the room's request is here. ``open_room`` or ``abort_room`` must
        follow; if this instance ends before, prefill fails the request at once. ``asked``: what
        the request adds to the model."""
        self._loop.call(self._once_known, self._claim, room, list(targets), asked)

    def open_room(
        self,
        room: int,
        targets: Sequence[DecodeTarget],
        *,
        pages: Pages,
        state_rows: Sequence[Pages | None],
        aux_row: int | None,
        prefix_tokens: int,
        num_receivers: int,
        memory: PagedMemory | None = None,
        asked: Asked = NOTHING_MORE,
        after: Sequence[Any] = (),
    ) -> None:
        """Ask ``targets`` for a room. ``pages`` of ``memory`` (default: the device's pool) must
        stay allocated until the listener has heard how the room ended or ``close_room`` has
        returned.

        ``num_receivers``: decode ranks that each target serves. ``asked``: as ``claim_room``
        says. ``after``: events of the device, before which no page is written. Raises
        ``TransferError`` for pages that do not exist, and for a room that is open: it keeps its
        pages.
        """
        memory = memory or self._memories.kv
        check_pages(memory.buffers, pages, "the scheduler")
        check_pages(self._memories.aux.buffers, one_row(aux_row), "the scheduler")
        states = []
        for index, state in enumerate(self._memories.states):
            rows = state_rows[index] if index < len(state_rows) else None
            if rows is not None:
                check_pages(state.buffers, rows, "the scheduler")
            states.append((state, rows))
        receiving = ReceiveRoom(
            room,
            next(self._generations),
            memory,
            pages,
            states,
            self._memories.aux,
            aux_row,
            num_expected=sum(not target.is_dummy for target in targets),
            after=after,
        )
        with self._table_lock:
            if self._rooms.setdefault(room, receiving) is not receiving:
                raise TransferError("this room is open for another request already.")
        arguments = receiving, list(targets), prefix_tokens, num_receivers, asked
        self._loop.call(self._once_known, self._open, *arguments)

    def close_room(self, room: int) -> None:
        """Take the room's pages back: once this has returned, they are not written."""
        with self._table_lock:
            receiving = self._rooms.pop(room, None)
        if receiving is not None:
            receiving.close()
        self._loop.call(self._drop_room, room, receiving)

    def abort_room(self, room: int, targets: Sequence[DecodeTarget], reason: str) -> None:
        """Tell the prefill ranks to drop the room, which may not have been opened yet."""
        self._loop.call(self._once_known, self._abort, room, list(targets), reason)

    def close(self) -> None:
        """Close all rooms and end the thread. Call once, not on its thread."""
        with self._table_lock:
            rooms = list(self._rooms.values())
            self._rooms.clear()
        for room in rooms:
            room.close()
        self._loop.call(self._links.say_goodbye, "decode is shutting down")
        self._loop.stop()
        self._links.close()

    # Sessions.

    def _set_model(self, model: bytes | None) -> None:
        self._model = model
        if model is not None:
            held, self._held = self._held, []
            for function, arguments in held:
                function(*arguments)

    def _once_known(self, function: Callable[..., None], *arguments: Any) -> None:
        """Say what concerns a room, in order, once the model is known."""
        if self._model is None:
            self._held.append((function, arguments))
        else:
            function(*arguments)

    def _claim(self, number: int, targets: list[DecodeTarget], asked: Asked) -> None:
        assert self._model is not None
        claim = messages.Claim(number, asked.of(self._model))
        for target in targets:
            self._links.link_to(target.address).send_control(claim)

    def _on_lost(self, link: PrefillLink, reason: str) -> None:
        reason = messages.peer_failed(reason)
        self.stats.num_sessions_lost += 1
        # A prefill that lives may not have heard of every room, if some messages were lost. Without
        # a Welcome it has heard of none.
        told_by = link if link.welcome is None else None
        for room in list(self._rooms.values()):
            if link in room.links:
                self._conclude_failed(room, reason, told_by)
        self._listener.prefill_lost(link.address, reason)

    def _on_failed(self, link: PrefillLink, message: messages.Failed) -> None:
        room = self._rooms.get(message.room)
        if room is None or room.generation != message.generation:
            return
        if link in room.links:
            reason = messages.peer_failed(sockets.printable(message.reason))
            self._conclude_failed(room, reason, told_by=link)

    def _tick(self, now: float) -> None:
        self._on_tick(self)
        self._links.tick(now)
        for room in list(self._rooms.values()):
            for link, progress in list(room.progress.items()):
                stalled = now - progress.moved_at
                if progress.has_gap and stalled > self._settings.progress_timeout_s:
                    reason = f"{link.name} sent {len(progress.seen)} slabs and then nothing"
                    reason = messages.peer_failed(f"{reason} for {stalled:.1f} s")
                    self._conclude_failed(room, reason)
                    break

    # Rooms.

    def _open(
        self,
        room: ReceiveRoom,
        targets: list[DecodeTarget],
        prefix_tokens: int,
        num_receivers: int,
        asked: Asked,
    ) -> None:
        if room.is_closed:
            if room.number not in self._rooms:  # prefill may know it by its claim
                self._abort(room.number, targets, "the request ended")
            return
        assert self._model is not None
        rows = [0 if item is None else len(item) for _, item in room.states]
        sizes = len(room.pages), rows, prefix_tokens, num_receivers
        try:
            room.links = [self._links.link_to(target.address) for target in targets]
            for target, link in zip(targets, room.links, strict=True):
                asks = target.is_dummy, asked.of(self._model)
                link.send_control(messages.Open(room.number, room.generation, *sizes, *asks))
        except Exception as error:
            # Conclude the room after any error: the scheduler would wait for it without end.
            logger.exception("KV transfer: internal error while asking for a room; it fails")
            self._conclude_failed(room, f"decode could not ask for the pages ({error})")

    def _abort(self, number: int, targets: list[DecodeTarget], reason: str) -> None:
        room = self._rooms.get(number)
        generation = 0 if room is None else room.generation
        for target in targets:
            # Connects where there is no session: the request may be waiting at prefill.
            self._links.link_to(target.address).send_control(
                messages.Abort(number, generation, reason)
            )

    def _drop_room(self, number: int, room: ReceiveRoom | None) -> None:
        if room is not None and not room.is_concluded:
            abort = messages.Abort(number, room.generation, "the request ended")
            for link in room.links:
                link.send_control(abort)
        self._listener.room_dropped(number)

    def _conclude_failed(
        self, room: ReceiveRoom, reason: str, told_by: PrefillLink | None = None
    ) -> None:
        """Close a room, report it, and tell the prefill ranks that do not know, over a new session
        where theirs was lost. If that is lost as well, they fail the room by their timeout."""
        if room.is_concluded:
            return  # it is complete, so the loss of its prefill ranks does not matter
        with self._table_lock:
            if self._rooms.get(room.number) is not room:
                return
            del self._rooms[room.number]
        room.close()
        self.stats.num_rooms_failed += 1
        # The listener first: the Abort raises for a room number that no message can hold.
        self._listener.room_failed(room.number, reason)
        abort = messages.Abort(room.number, room.generation, reason)
        for link in room.links:
            if link is not told_by:
                self._links.link_to(link.address).send_control(abort)

    # Data.

    def _on_data(self, link: PrefillLink, index: int) -> None:
        confirmed: list[tuple[int, int, int]] = []
        try:
            for frames in received(link.data[index], MAX_DATA_MESSAGES):
                self._serve_data(link, index, frames, confirmed)
                if link.is_gone:
                    return
        except TransferError as error:
            self._links.lose(link, f"broke the protocol: {error}")
        finally:
            if confirmed and not link.is_gone:
                link.send_data(messages.Ack(confirmed), index)

    def _serve_data(
        self,
        link: PrefillLink,
        index: int,
        frames: list[zmq.Frame],
        confirmed: list[tuple[int, int, int]],
    ) -> None:
        parsed = self._parse(link, frames)
        if parsed is None:
            return
        message, payload = parsed
        seq = message.num_slabs if isinstance(message, messages.Last) else message.seq
        key = (message.room, message.generation, seq)
        room = self._rooms.get(message.room)
        if room is None or room.generation != message.generation:
            self.stats.num_late += 1
            if isinstance(message, messages.Last):
                # A confirmation would say that all has arrived; prefill may lack our abort yet.
                abort = messages.Abort(message.room, message.generation, "the room ended before")
                link.send_control(abort)
            else:
                confirmed.append(key)
            return
        if link not in room.links:
            raise TransferError("it sent data of a room that another prefill instance serves.")
        progress = room.progress.setdefault(link, Progress(moved_at=time.monotonic()))
        try:
            if isinstance(message, messages.Last):
                room.finish(message, progress)
            else:
                self._land(room, link, message, payload, progress)
                confirmed.append(key)
            is_received = room.conclude()
        except DamagedError:
            self.stats.num_damaged += 1
            link.send_data(messages.Nack(*key), index)
            return
        except TransferError as error:
            confirmed.append(key)
            self._conclude_failed(room, str(error))
            return
        except Exception as error:
            # A pool that cannot be written fails only the room that was written for.
            logger.exception("KV transfer: error while writing the pool; the room fails")
            confirmed.append(key)
            self._conclude_failed(room, f"decode could not write its pages ({error})")
            return
        if progress.is_complete and progress.num_slabs is not None:
            # Not before: prefill frees the pages on this confirmation, and a damaged slab has to
            # be sent again.
            confirmed.append((message.room, message.generation, progress.num_slabs))
        if is_received:
            self.stats.num_rooms_received += 1
            self._listener.room_received(room.number)

    def _parse(
        self, link: PrefillLink, frames: list[zmq.Frame]
    ) -> tuple[messages.AnyDataFromPrefill, Any] | None:
        """Message and payload; None if the peer did not make the authenticator."""
        messages.check_version(frames[0].bytes, link.name)
        if len(frames) < 3:
            raise TransferError("a data message has no header.")
        header = frames[1].bytes
        message = sockets.decode(header, messages.data_from_prefill)
        payload = frames[3].buffer if len(frames) > 3 else b""
        is_named = isinstance(message, messages.Slab) and message.form == messages.NAMED
        signed = (header, bytes(payload)) if is_named else (header,)
        memory = link.peer_memory if is_named else None
        is_right = (memory or link.tagger).is_right(frames[2].bytes, *signed)
        # Under an unusable offer nothing is read: the pages' bytes are asked for instead.
        if not is_right and (memory is None or memory.problem is None):
            self.stats.num_forged += 1
            return None
        return message, payload

    def _land(
        self,
        room: ReceiveRoom,
        link: PrefillLink,
        message: messages.Slab,
        payload: Any,
        progress: Progress,
    ) -> None:
        if message.seq in progress.seen:
            return
        self.stats.num_slabs += 1
        if message.form != messages.NAMED:
            self.stats.received_bytes += len(payload)
        before = room.kv_bytes
        if room.land(message, payload, link.pairs, self._layout, link.peer_memory):
            progress.mark(message.seq, time.monotonic())
        if message.form == messages.NAMED:
            self.stats.pulled_bytes += room.kv_bytes - before
