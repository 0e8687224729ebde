"""What the servers say that they hold: in device and host memory by SGLang's KV events, on NVMe in
the protocol that they tell each other in.

SGLang numbers its batches and replays the last ten thousand. After a gap that no replay fills, what
the server holds in device and host memory is forgotten, since removals may have been missed. Pages
on disks change slowly, and are looked up by the server itself before they count.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from sglang_tiered.errors import TransferError
from sglang_tiered.route.pages import DEVICE, HOST, MEDIA, HeldPages
from sglang_tiered.sharing.mirror import UNTOLD, Mirror
from sglang_tiered.sharing.pages.messages import (
    ID_BYTES,
    MAX_FOLLOW_FRAME_BYTES,
    VERSION_FRAME,
    Changes,
    Follow,
    decode_from_server,
)
from sglang_tiered.wire.sockets import encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from concurrent.futures import Future

    import numpy as np
    import numpy.typing as npt

    from sglang_tiered.policy.server_costs import EventSource, RankCosts
    from sglang_tiered.sharing.mirror import MirroredPeer


logger = logging.getLogger(__name__)

MAX_BATCH_BYTES, MAX_WAITING = 16 << 20, 64
"""What a server that sends faster than is read can have here: their product."""
REPLAY_S = 10.0
_END = (-1).to_bytes(8, "big", signed=True)


MAX_PAGES, MAX_SERVERS = 1 << 24, 1024
"""A page takes about 36 bytes up to 64 servers, however many of them hold it, and 16 for each 64
more."""
AGAIN_S, SILENCE_S, STOP_S = 1.0, 10.0, 5.0


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


_DECODER = msgspec.msgpack.Decoder(_Batch)


class Publisher(NamedTuple):
    """Where events of one replica are. ``replay`` is None where the server replays none."""

    endpoint: str
    replay: str | None
    topic: str


def publisher_of(source: EventSource, url: str, rank: int) -> Publisher:
    """Return the publisher of a replica of the server at ``url``."""
    replay, base = None, source.replay_port
    if base is not None:
        replay = reachable(f"tcp://{source.host}:{base + rank}", url)
    endpoint = reachable(f"tcp://{source.host}:{source.port + rank}", url)
    return Publisher(endpoint, replay, source.topic)


def reachable(endpoint: str, url: str) -> str:
    """Return an endpoint that a server tells of; a host that stands for all is its own."""
    head, _, port = endpoint.rpartition(":")
    if head.removeprefix("tcp://") not in ("*", "0.0.0.0", "::", "[::]"):
        return endpoint
    host = urlsplit(url).hostname or "127.0.0.1"
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def apply(index: HeldPages, server: int, payload: bytes) -> None:
    """Take in a batch. Raises ``msgspec.DecodeError`` for what is none."""
    for event in _DECODER.decode(payload).events:
        if isinstance(event, AllBlocksCleared):
            index.forget(server)
            continue
        medium = MEDIA.get(event.medium or "GPU")
        if medium is None:
            continue
        if isinstance(event, BlockStored):
            index.store(server, medium, event.block_hashes)
        else:
            index.remove(server, medium, event.block_hashes)


async def follow(
    context: zmq.asyncio.Context, publisher: Publisher, index: HeldPages, server: int
) -> None:
    """Keep the index up to date until cancelled. Raises ``msgspec.DecodeError`` or ``zmq.ZMQError``
    for a publisher that cannot be followed."""
    with context.socket(zmq.SUB) as socket:
        bound(socket, MAX_BATCH_BYTES)
        socket.subscribe(publisher.topic)
        socket.connect(publisher.endpoint)
        # Those that come meanwhile wait in the socket.
        due = await _replay(context, publisher, index, server, 0)
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3:
                continue
            number = int.from_bytes(frames[1], "big")
            if number < due:  # replayed already, or a publisher that began again
                continue
            if number > due:
                due = await _replay(context, publisher, index, server, due)
            if number >= due:
                apply(index, server, frames[2])
                due = number + 1


def bound(socket: zmq.asyncio.Socket, most: int) -> None:
    """Take messages of so many bytes, and few at once."""
    options = {zmq.MAXMSGSIZE: most, zmq.RCVHWM: MAX_WAITING, zmq.IPV6: 1, zmq.LINGER: 0}
    for option, value in options.items():
        socket.set(option, value)


async def _replay(
    context: zmq.asyncio.Context, publisher: Publisher, index: HeldPages, server: int, due: int
) -> int:
    """Take in what was published from batch ``due`` on. Returns the number of the next."""
    first = due
    async for number, payload in _replayed(context, publisher, due):
        if number > due and first:  # before any, nothing was known that could be wrong
            index.forget(server, DEVICE | HOST)
            logger.info("%s: events were lost; its memory is learnt anew", publisher.endpoint)
        apply(index, server, payload)
        due = number + 1
    if first and due == first:  # nobody filled the gap
        index.forget(server, DEVICE | HOST)
    return due


async def _replayed(
    context: zmq.asyncio.Context, publisher: Publisher, due: int
) -> AsyncIterator[tuple[int, bytes]]:
    if publisher.replay is None:
        return
    with context.socket(zmq.DEALER) as socket:
        bound(socket, MAX_BATCH_BYTES)
        socket.connect(publisher.replay)
        await socket.send_multipart([b"", due.to_bytes(8, "big")])
        while True:
            try:
                async with asyncio.timeout(REPLAY_S):  # ``wait_for`` may lose a cancellation
                    frames = await socket.recv_multipart()
            except TimeoutError:
                return
            if len(frames) != 4 or frames[2] == _END:
                return
            yield int.from_bytes(frames[2], "big"), frames[3]


class Followed(Protocol):
    """A replica of a server at ``url``: its last record, and what is known of its pages."""

    record: RankCosts
    known: MirroredPeer | None

    @property
    def url(self) -> str: ...


class PageFollower:
    """Which pages servers hold on NVMe. ``start`` and ``bits`` are the event loop's that owns it;
    ``close`` it.

    A picker asks as another server would (``Follow``): for all names first, then for what came and
    went. So it knows them after a restart too. What was erased is told to be gone; of erasures it
    hears nothing else. Servers with keys (``--tier-peer-keys``) are not followed: their key opens
    pages.

    Coroutines on a thread of their own, as a table that grows takes seconds. Look-ups take no lock.
    """

    def __init__(self) -> None:
        self._mirror = Mirror(MAX_PAGES, MAX_SERVERS, salt=0, digest=bytes, clock=time.monotonic)
        self._id = secrets.token_bytes(ID_BYTES)
        self._told: dict[str, str] = {}  # what is wrong with a server, by URL
        self._loop: asyncio.AbstractEventLoop | None = None  # before there is a server

    def start(self, replica: Followed) -> Future[None]:
        """Follow a server until the future is cancelled. The slot of its ``known`` is
        its bit."""
        if self._loop is None:
            self._context = zmq.asyncio.Context()
            self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
            self._loop = self._runner.get_loop()
            self._thread = threading.Thread(target=self._run, name="pages", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._keep(replica), self._loop)

    def bits(self, pages: npt.NDArray[np.uint64]) -> list[int]:
        """Return for each page the bits of the replicas that hold it."""
        first, *more = self._mirror.holders(pages).tolist()
        for at, word in enumerate(more, 1):
            first = [low | high << 64 * at for low, high in zip(first, word, strict=True)]
        return first  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)

    # ---- Its thread ----

    def _run(self) -> None:
        with self._runner:  # which ends what is under way
            self._runner.get_loop().run_forever()
        self._context.destroy(linger=0)

    async def _keep(self, replica: Followed) -> None:
        known = self._mirror.join(secrets.token_hex(), "")
        if known is None:  # more than ``MAX_SERVERS``
            return
        replica.known = known
        try:
            while True:
                record = replica.record
                if record.pages_at and record.namespace and not record.keyed:
                    where = reachable(record.pages_at, replica.url)
                    try:
                        await self._follow(where, bytes.fromhex(record.namespace), replica, known)
                    except Exception as error:  # whatever is wrong with a server, it is asked again
                        self._report(replica, str(error) or type(error).__name__)
                        self._mirror.unload(known)
                await asyncio.sleep(AGAIN_S)
        finally:
            self._mirror.drop(known)
            self._told.pop(replica.url, None)

    async def _follow(
        self, where: str, namespace: bytes, replica: Followed, known: MirroredPeer
    ) -> None:
        """Keep a server's pages. Raises ``TransferError``, ``zmq.ZMQError``, or ``TimeoutError``
        once it says nothing, for one that cannot be followed."""
        known.epoch, known.cursor, told = 0, 0, UNTOLD  # of another process, perhaps
        with self._context.socket(zmq.DEALER) as socket:
            bound(socket, MAX_FOLLOW_FRAME_BYTES)
            socket.connect(where)
            while True:
                question = Follow(namespace, self._id, bytes(ID_BYTES), told, *known.position)
                await socket.send_multipart([VERSION_FRAME, encode(question)])
                async with asyncio.timeout(SILENCE_S):
                    frames = await socket.recv_multipart()
                message = decode_from_server(frames)
                if not isinstance(message, Changes) or message.namespace != namespace:
                    raise TransferError("it has another model, or other settings or weights")
                told = message.digest
                self._mirror.take(known, message, frames[2:])
                if known.num_cut:
                    self._report(replica, f"there are more than {MAX_PAGES:,} pages")
                elif known.is_loaded:
                    self._told.pop(replica.url, None)

    def _report(self, replica: Followed, why: str) -> None:
        if why != self._told.get(replica.url):
            logger.info("pages of %s are not followed: %s", replica.url, why)
        self._told[replica.url] = why
