"""The decode end: opens rooms at prefill ranks and copies what they send into its pages.

Connects to both sockets of each prefill rank and binds nothing, so a decode host needs no open
port. All state except whether a room is closed belongs to one thread; results come back through
the listener on that thread.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_tiered.errors import TransferError
from sglang_tiered.transfer import messages
from sglang_tiered.transfer.memory import check_pages
from sglang_tiered.transfer.messages import NOTHING_MORE
from sglang_tiered.transfer.rooms import Progress, ReceiveRoom, TransferStats
from sglang_tiered.transfer.sessions import PrefillLinks
from sglang_tiered.wire import sockets
from sglang_tiered.wire.loop import EndpointLoop
from sglang_tiered.wire.sockets import received

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import zmq

    from sglang_tiered.config import TransferConfig
    from sglang_tiered.transfer.addresses import Address
    from sglang_tiered.transfer.memory import Memories, PagedMemory, Pages
    from sglang_tiered.transfer.messages import Asked, KVLayout
    from sglang_tiered.transfer.rooms import Listener
    from sglang_tiered.transfer.sessions import PrefillLink
    from sglang_tiered.wire.keys import Keys


logger = logging.getLogger(__name__)

MAX_DATA_MESSAGES = 4
"""Slabs handled before the control sockets are polled again: about 16 MiB, a few ms."""


class DecodeEndpoint:
    """Methods may be called on any thread and return at once; ``close`` ends it. Prefill ranks are
    named by their addresses. ``server``: where this instance answers requests, for prefill to name.
    ``on_tick`` is called a few times a second on the endpoint's thread, and ``on_lost`` with the
    address and the reason of a session that ended, after its rooms have failed. The next room
    connects anew. Prefill hears of no room before ``set_model``."""

    def __init__(
        self,
        *,
        server: str,
        layout: KVLayout,
        memories: Memories,
        listener: Listener,
        on_lost: Callable[[Address, str], None],
        settings: TransferConfig,
        keys: Keys | None = None,
        on_tick: Callable[[DecodeEndpoint], None] = lambda _: None,
    ) -> None:
        self._memories = memories
        self._layout = layout
        self._listener = listener
        self._on_ended = on_lost
        self._settings = settings
        self._on_tick = on_tick
        self._generations = itertools.count(1)
        self._table_lock = threading.Lock()
        self._rooms: dict[int, ReceiveRoom] = {}
        self._model: bytes | None = None  # of the KV that is taken
        self._held: list[Callable[[], None]] = []  # until it is known
        self.stats = TransferStats()
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
        self, room: int, targets: Sequence[Address], asked: Asked = NOTHING_MORE
    ) -> None:
        """Tell prefill that the room's request is here. ``open_room`` or ``abort_room`` must
        follow; if this instance ends before, prefill fails the request at once. ``asked``: what
        the request adds to the model."""
        self._loop.call(self._once_known, self._claim, room, list(targets), asked)

    def open_room(
        self,
        room: int,
        targets: Sequence[Address],
        *,
        dummies: Collection[Address] = (),
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

        ``dummies``: targets that take part, but send nothing (replicated KV).
        ``num_receivers``: decode ranks that each target serves. ``asked``: as ``claim_room``
        says. ``after``: events of the device, before which no page is written. Raises
        ``TransferError`` for pages that do not exist, and for a room that is open: it keeps its
        pages.
        """
        memory = memory or self._memories.kv
        check_pages(memory.buffers, pages)
        num_rows = self._memories.count_rows(state_rows, aux_row)
        receiving = ReceiveRoom(
            room,
            next(self._generations),
            self._memories,
            memory,
            pages,
            [*state_rows, *[None] * len(num_rows)][: len(num_rows)],
            aux_row,
            num_expected=sum(target not in dummies for target in targets),
            after=after,
        )
        with self._table_lock:
            if self._rooms.setdefault(room, receiving) is not receiving:
                raise TransferError("this room is open for another request already.")
        sizes = len(pages), num_rows, prefix_tokens, num_receivers
        to = list(targets), frozenset(dummies)
        self._loop.call(self._once_known, self._open, receiving, *to, sizes, asked)

    def close_room(self, room: int) -> None:
        """Take the room's pages back: once this has returned, they are not written."""
        with self._table_lock:
            receiving = self._rooms.pop(room, None)
        if receiving is not None:
            receiving.close()
        self._loop.call(self._drop_room, room, receiving)

    def abort_room(self, room: int, targets: Sequence[Address], reason: str) -> None:
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
            for call in held:
                call()

    def _once_known(self, function: Callable[..., None], *arguments: Any) -> None:
        """Say what concerns a room, in order, once the model is known."""
        if self._model is None:
            self._held.append(partial(function, *arguments))
        else:
            function(*arguments)

    def _claim(self, number: int, targets: list[Address], asked: Asked) -> None:
        assert self._model is not None
        claim = messages.Claim(number, asked.of(self._model))
        for target in targets:
            self._links.link_to(target).send_control(claim)

    def _on_lost(self, link: PrefillLink, reason: str) -> None:
        reason = messages.peer_failed(reason)
        self.stats.num_sessions_lost += 1
        # A prefill that lives may not have heard of every room, if some messages were lost. Without
        # a Welcome it has heard of none.
        told_by = link if link.welcome is None else None
        for room in list(self._rooms.values()):
            if link in room.links:
                self._conclude_failed(room, reason, told_by)
        self._on_ended(link.address, reason)

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
        targets: list[Address],
        dummies: frozenset[Address],
        sizes: tuple[int, list[int], int, int],
        asked: Asked,
    ) -> None:
        """``sizes``: the fields of ``Open`` that are about them."""
        if room.is_closed:
            if room.number not in self._rooms:  # prefill may know it by its claim
                self._abort(room.number, targets, "the request ended")
            return
        assert self._model is not None
        model = asked.of(self._model)
        try:
            room.links = [self._links.link_to(target) for target in targets]
            for target, link in zip(targets, room.links, strict=True):
                asks = *sizes, target in dummies
                link.send_control(messages.Open(room.number, room.generation, *asks, model))
        except Exception as error:
            # Conclude the room after any error: the scheduler would wait for it without end.
            logger.exception("KV transfer: internal error while asking for a room; it fails")
            self._conclude_failed(room, f"decode could not ask for the pages ({error})")

    def _abort(self, number: int, targets: list[Address], reason: str) -> None:
        room = self._rooms.get(number)
        generation = 0 if room is None else room.generation
        abort = messages.Abort(number, generation, reason)
        for target in targets:
            # Connects where there is no session: the request may be waiting at prefill.
            self._links.link_to(target).send_control(abort)

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
            elif self._land(room, link, message, payload, progress):
                confirmed.append(key)
            else:
                self.stats.num_damaged += 1
                link.send_data(messages.Nack(*key), index)
                return
            is_received = room.conclude()
        except Exception as error:
            # A pool that cannot be written fails only the room that was written for.
            reason = str(error)
            if not isinstance(error, TransferError):
                logger.exception("KV transfer: error while writing the pool; the room fails")
                reason = f"decode could not write its pages ({error})"
            confirmed.append(key)
            self._conclude_failed(room, reason)
            return
        if progress.last is not None and progress.is_complete:
            # Not before: prefill frees the pages on this confirmation, and a damaged slab has to
            # be sent again.
            confirmed.append((message.room, message.generation, progress.last.num_slabs))
        if is_received:
            self.stats.num_rooms_done += 1
            self._listener.room_done(room.number)

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
            self.stats.num_refused += 1
            return None
        return message, payload

    def _land(
        self,
        room: ReceiveRoom,
        link: PrefillLink,
        slab: messages.Slab,
        payload: Any,
        progress: Progress,
    ) -> bool:
        """Returns False for a slab that has to be sent again."""
        if slab.seq in progress.seen:
            return True
        self.stats.num_slabs += 1
        before, is_named = room.kv_bytes, slab.form == messages.NAMED
        if not is_named:
            self.stats.wire_bytes += len(payload)
        if not room.land(slab, payload, link.pairs, self._layout, link.peer_memory):
            return False
        progress.mark(slab.seq, time.monotonic())
        self.stats.same_host_bytes += room.kv_bytes - before if is_named else 0
        return True
