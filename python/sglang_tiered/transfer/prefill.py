"""The prefill end: admits decode ranks, and sends them the pages of their rooms.

Two sockets are bound, control and data, so that an abort never queues behind a hundred megabytes;
decode connects to both. All state belongs to one thread; the public methods only queue a call for
it, and results come back through the listener on that thread.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import zmq

from sglang_tiered.errors import TransferError
from sglang_tiered.transfer import messages
from sglang_tiered.transfer.memory import check_pages
from sglang_tiered.transfer.messages import NOTHING_MORE, mismatch
from sglang_tiered.transfer.rooms import RoomTable, SendRoom, TransferStats
from sglang_tiered.transfer.sessions import DecodePeer, DecodePeers
from sglang_tiered.wire import sockets
from sglang_tiered.wire.loop import GOODBYE_MS, EndpointLoop
from sglang_tiered.wire.sockets import received

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sglang_tiered.config import TransferConfig
    from sglang_tiered.transfer.memory import Memories
    from sglang_tiered.transfer.messages import Asked, KVLayout
    from sglang_tiered.transfer.rooms import Listener
    from sglang_tiered.transfer.send_queue import Chunk, Parcel
    from sglang_tiered.wire.keys import Keys


MAX_MESSAGES = 64
"""Messages read from one socket at a time."""

MAX_POSTS = 2
"""Messages in a row before the sockets are looked at again: a slab takes a ms or two."""

COMPUTE_POLL_S = 0.001
"""How often the endpoint asks whether a device has computed pages."""

WARNING_INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


class PrefillEndpoint:
    """Listens from its construction on; ``close`` ends it. Methods may be called on any thread
    and return at once.

    ``host`` is bound as it is, to free ports. ``server``: where this instance answers requests, to
    be named to who is refused. ``on_tick`` is called a few times a second on the endpoint's thread.
    ``on_ready`` gets the number of a room whose pages every decode rank has allocated, and of the
    tokens that it holds already. No room is ready before ``set_model``. Raises ``TransferError``
    when the address cannot be bound.
    """

    def __init__(
        self,
        *,
        host: str,
        server: str,
        layout: KVLayout,
        memories: Memories,
        rank: int,
        listener: Listener,
        on_ready: Callable[[int, int], None],
        settings: TransferConfig,
        keys: Keys | None = None,
        on_tick: Callable[[PrefillEndpoint], None] = lambda _: None,
    ) -> None:
        self._memories = memories
        self._listener = listener
        self._on_ready = on_ready
        self._settings = settings
        self._on_tick = on_tick
        self._server = server
        self._model: bytes | None = None  # of the KV that is sent
        self._model_note = ""
        self._peers = DecodePeers(
            host=host, layout=layout, memories=memories, rank=rank, settings=settings, keys=keys
        )
        self._rooms: RoomTable[DecodePeer] = RoomTable(settings)
        self.stats = TransferStats()
        self._warned_at = -WARNING_INTERVAL_S
        self._loop = EndpointLoop("kv-transfer-prefill", self._step, self._tick)
        self._loop.call(memories.enter_thread)
        if self._peers.door is not None:  # before data: pages are named for who has come
            self._loop.add_socket(self._peers.door.fileno(), self._peers.serve_door)
        self._loop.add_socket(self._peers.control, self._on_control)
        self._loop.add_socket(self._peers.data, self._on_data)
        self._loop.start()

    @property
    def control_port(self) -> int:
        """The port that decode ranks connect to. They learn the data port from ``Welcome``."""
        return self._peers.control_port

    @property
    def num_rooms(self) -> int:
        return len(self._rooms)

    @property
    def num_sessions(self) -> int:
        return len(self._peers)

    def set_model(self, model: bytes | None, note: str = "") -> None:
        """Name the model (``messages.Open``) of the KV that is sent from now on. Decode ranks of
        another are refused. None: rooms wait until it is known. ``note`` is told to who is
        refused, after the sentence."""
        self._loop.call(self._set_model, model, note)

    def fail_rooms(self, reason: str) -> None:
        """Fail every room there is: its KV is, or may be, of another model than is named next."""
        self._loop.call(self._fail_rooms, reason)

    def expect_room(self, room: int, asked: Asked = NOTHING_MORE) -> None:
        """Admit the room's request: from here on the endpoint waits for its decode ranks.
        ``asked``: what the request adds to the model."""
        self._loop.call(self._expect, room, asked)

    def send_chunk(self, room: int, chunk: Chunk) -> None:
        """Send computed pages to every decode rank of the room. ``chunk`` must not change."""
        self._loop.call(self._send_chunk, room, chunk)

    def drop_room(self, number: int, reason: str = "prefill dropped the request") -> None:
        """Drop a room whose request has ended. If it was not sent, tell its decode ranks why, now
        or when they come. Once this has returned, its pages may be used for something else."""
        room = self._rooms.get(number)
        if room is not None:
            room.fence.close()
        self._loop.call(self._drop_room, number, reason)

    def close(self) -> None:
        """Tell the decode ranks, stop the thread, close the sockets. Once; not on its thread."""
        self._loop.call(self._say_goodbye)
        self._loop.stop()
        self._peers.close()

    # Control.

    def _on_control(self) -> None:
        for sender, version, *rest in received(self._peers.control, MAX_MESSAGES):
            identity, body = sender.bytes, rest[0].buffer if rest else b""
            try:
                messages.check_version(version.bytes, "a decode instance")
                self._serve(identity, sockets.decode(body, messages.control_from_decode))
            except TransferError as error:
                self._refuse(identity, str(error))

    def _serve(self, identity: bytes, message: messages.AnyFromDecode) -> None:
        if isinstance(message, messages.Hello):
            for peer in self._peers:
                if peer.hello.instance == message.instance or peer.identity == identity:
                    self._lose(peer, "the decode instance connected anew")
            self._peers.admit(identity, message, time.monotonic())
            return
        known = self._peers.by_identity(identity)
        if known is None:
            self._refuse(identity, "prefill does not know this session; say hello again.")
            return
        known.last_seen = time.monotonic()
        if isinstance(message, messages.Ping):
            if message.number != known.num_heard:
                self._end(known, "control messages to prefill were lost on the way")
            return
        known.num_heard += 1
        match message:
            case messages.Claim():
                self._claim(known, message)
            case messages.Open():
                self._open(known, message)
            case messages.Abort():
                self._abort(known, message)
            case messages.Bye():
                reason = sockets.printable(message.reason)
                self._lose(known, f"decode ended its session: {reason}")

    def _refuse(self, identity: bytes, reason: str) -> None:
        self.stats.num_refused += 1
        now = time.monotonic()
        if now - self._warned_at >= WARNING_INTERVAL_S:  # any host that reaches the port causes it
            self._warned_at = now
            logger.warning("KV transfer: refused a decode instance (%s); its rooms fail", reason)
        self._peers.send(identity, messages.Refuse(reason))

    # Rooms.

    def _set_model(self, model: bytes | None, note: str) -> None:
        self._model, self._model_note = model, note
        for room in self._rooms:
            self._settle(room)

    def _settle(self, room: SendRoom[DecodePeer]) -> None:
        """Fail a room of which a decode rank has another model or prompt than this request's, and
        report one that is complete. Once the model is known."""
        if self._model is None or not room.is_expected:
            return
        own = room.asked.of(self._model)
        for peer, ask in room.asks.items():
            if ask.model != own:
                decode = sockets.printable(peer.hello.server)
                reason = mismatch(self._server, own, decode, ask.model, self._model_note)
                self._fail(room.number, reason)
                return
        if room.is_complete and not room.is_ready:
            room.is_ready = True
            opens = room.opens
            room.asks = {**opens}  # from here on only the ranks that opened it matter
            room.unfinished = {peer for peer, opened in opens.items() if not opened.is_dummy}
            self._on_ready(room.number, next(iter(opens.values())).prefix_tokens)

    def _fail_rooms(self, reason: str) -> None:
        for room in self._rooms:
            self._fail(room.number, reason)

    def _claim(self, peer: DecodePeer, message: messages.Claim) -> None:
        room = self._rooms.claim_room(peer, message, time.monotonic())
        if not isinstance(room, str):
            self._settle(room)

    def _expect(self, number: int, asked: Asked) -> None:
        room = self._rooms.expect_room(number, time.monotonic())
        if isinstance(room, str):
            self._listener.room_failed(number, room)
            return
        room.asked = asked
        self._settle(room)

    def _open(self, peer: DecodePeer, message: messages.Open) -> None:
        room = self._rooms.open_room(peer, message, time.monotonic())
        if isinstance(room, str):
            failed = messages.Failed(message.room, message.generation, room)
            self._peers.send(peer.identity, failed)
        else:
            self._settle(room)

    def _send_chunk(self, number: int, chunk: Chunk) -> None:
        room = self._rooms.get(number)
        if room is None or not room.is_ready:
            return
        opens = room.opens
        try:
            if chunk.is_computed is None:  # else ``pages`` may not be known yet
                check_pages(self._memories.kv.buffers, chunk.pages)
            rows = self._memories.count_rows(
                chunk.state_rows if chunk.is_last else (), chunk.aux_row
            )
            for peer in room.unfinished if chunk.is_last else ():
                if rows != opens[peer].num_state_rows:
                    raise TransferError(
                        f"prefill has {rows} rows of the model's states and decode has room for "
                        f"{opens[peer].num_state_rows}."
                    )
        except TransferError as error:
            self._fail(number, str(error))
            return
        room.is_last_queued |= chunk.is_last
        for peer in room.unfinished:
            peer.sending.add_chunk(opens[peer], chunk, room.fence)
        self._check_sent(room)

    def _check_sent(self, room: SendRoom[DecodePeer]) -> None:
        if room.is_last_queued and not room.unfinished:
            self._rooms.remove_room(room.number)
            room.fence.close()  # of a slab that was asked for again
            self.stats.num_rooms_done += 1
            self._listener.room_done(room.number)

    def _abort(self, peer: DecodePeer, message: messages.Abort) -> None:
        room = self._rooms.get(message.room)
        opened = None if room is None else room.opens.get(peer)
        if opened is not None and opened.generation != message.generation:
            return
        if room is not None and opened is None and room.is_ready:
            return  # all of its decode ranks are known, and this is another one
        self._fail(message.room, f"decode dropped it: {sockets.printable(message.reason)}")

    def _fail(self, number: int, reason: str) -> None:
        room = self._rooms.fail_room(number, reason, time.monotonic())
        if room is None:
            return
        room.fence.close()
        self.stats.num_rooms_failed += 1
        for peer, opened in room.opens.items():
            peer.sending.drop_room(number)
            self._peers.send(peer.identity, messages.Failed(number, opened.generation, reason))
        if room.is_expected:
            self._listener.room_failed(number, reason)

    def _drop_room(self, number: int, reason: str) -> None:
        room = self._rooms.get(number)
        if room is not None:
            room.is_expected = False  # its request need not be told
            self._fail(number, reason)
        self._listener.room_dropped(number)

    # Peers.

    def _lose(self, peer: DecodePeer, reason: str) -> None:
        if not self._peers.remove(peer):
            return
        self.stats.num_sessions_lost += 1
        for room in self._rooms.of_session(peer):
            del room.asks[peer]
            self._fail(room.number, messages.peer_failed(reason))

    def _say_goodbye(self) -> None:
        for peer in self._peers:
            for room in self._rooms.of_session(peer):
                room.fence.close()  # the pool may go with this endpoint
            self._peers.send(peer.identity, messages.Bye("prefill is shutting down"))
        self._loop.remove_socket(self._peers.control, GOODBYE_MS)

    def _tick(self, now: float) -> None:
        self._on_tick(self)
        for peer in self._peers:
            silence = now - peer.last_seen
            if silence > self._settings.peer_timeout_s:
                self._lose(peer, f"the decode instance has been silent for {silence:.1f} s")
                continue
            if not self._peers.send(peer.identity, messages.Pong(peer.num_sent)):
                self._lose(peer, "the decode instance closed the connection")
                continue
            waited = now - peer.admitted_at
            if not peer.is_joined and waited > self._settings.connect_timeout_s:
                port = self._peers.data_port
                self._end(peer, f"no data connection reached port {port} within {waited:.1f} s")
                continue
            stalled = now - peer.sending.quiet_since
            if peer.sending.unconfirmed and stalled > self._settings.progress_timeout_s:
                self._end(peer, f"the decode instance has taken no data for {stalled:.1f} s")
        for room in self._rooms.overdue(now):
            waited = now - room.created_at
            late = "decode instance asked for" if room.is_expected else "request reached prefill of"
            self._fail(room.number, f"no {late} this room within {waited:.0f} s")

    def _end(self, peer: DecodePeer, reason: str) -> None:
        self._peers.send(peer.identity, messages.Bye(reason))
        self._lose(peer, reason)

    # Data.

    def _on_data(self) -> None:
        for sender, version, *rest in received(self._peers.data, MAX_MESSAGES):
            link, body = sender.bytes, rest[0].buffer if rest else b""
            try:
                messages.check_version(version.bytes, "a decode instance")
                message = sockets.decode(body, messages.data_from_decode)
            except TransferError:
                self.stats.num_refused += 1
                continue
            peer = self._peers.by_connection(link)
            if isinstance(message, messages.Join):
                self.stats.num_refused += not self._peers.join(link, message)
            elif peer is not None and isinstance(message, messages.Ack):
                self._confirm(peer, message.slabs)
            elif peer is not None:
                self._resend(peer, message)

    def _confirm(self, peer: DecodePeer, keys: Iterable[tuple[int, int, int]]) -> None:
        now = peer.last_seen = time.monotonic()
        for key in keys:
            parcel = peer.sending.confirm(key, now)
            if parcel is None or not parcel.is_last:
                continue
            room = self._rooms.get(key[0])
            opened = None if room is None else room.opens.get(peer)
            if room is not None and opened is not None and opened.generation == key[1]:
                room.unfinished.discard(peer)
                peer.sending.drop_room(key[0])
                self._check_sent(room)

    def _resend(self, peer: DecodePeer, nack: messages.Nack) -> None:
        self.stats.num_damaged += 1
        room, key = self._rooms.get(nack.room), (nack.room, nack.generation, nack.seq)
        if not peer.sending.resend(key, room.fence if room else None, time.monotonic()):
            self._fail(nack.room, f"slab {nack.seq} could not be delivered intact")

    def _step(self) -> float | None:
        """Send a few messages of one peer; peers take turns. Returns the seconds until there is
        more to send, or None if that is unknown."""
        wait_s = None
        for peer in self._peers:
            if not peer.sending.queue or not peer.is_joined:
                continue
            if self._post_some(peer):
                self._peers.put_last(peer)
                return 0.0
            if peer.sending.awaits_compute:
                wait_s = COMPUTE_POLL_S
        return wait_s

    def _post_some(self, peer: DecodePeer) -> int:
        for number in range(MAX_POSTS):
            try:
                parcel = peer.sending.next_parcel()
            except Exception as error:
                # A pool that cannot be read fails only the room that was read for.
                logger.exception("KV transfer: error while reading the pool; the room fails")
                room = peer.sending.queue[0].room
                self._fail(room, f"prefill could not read its pages ({error})")
                return number + 1
            if parcel is None or not self._post(peer, parcel):
                return number
        return MAX_POSTS

    def _post(self, peer: DecodePeer, parcel: Parcel) -> bool:
        frames = [peer.link_of(parcel.key[2]), *parcel.frames]
        try:
            self._peers.data.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            self._end(peer, f"the data connection to the decode instance broke ({error})")
            return False
        peer.sending.mark_sent(parcel, time.monotonic())
        self.stats.num_slabs += 1
        self.stats.same_host_bytes += parcel.named_bytes
        if not parcel.is_last and not parcel.named_bytes:
            self.stats.wire_bytes += parcel.frames[-1].nbytes
        return True
