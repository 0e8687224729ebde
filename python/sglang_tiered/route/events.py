"""``follow``: the KV events of one server (one data-parallel replica), from its replay on.

SGLang numbers its batches and replays the last ten thousand. After a gap that no replay fills, what
the server holds in device and host memory is forgotten, since removals may have been missed. Pages
on disks change slowly, and are looked up by the server itself before they count.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from sglang_tiered.route.pages import DEVICE, HOST, MEDIA, HeldPages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sglang_tiered.policy.server_costs import EventSource

__all__ = ["Publisher", "apply", "bound", "follow", "publisher_of", "reachable"]

MAX_BATCH_BYTES, MAX_WAITING = 16 << 20, 64
"""What a server that sends faster than is read can have here: their product."""
REPLAY_S = 10.0
_END = (-1).to_bytes(8, "big", signed=True)

logger = logging.getLogger(__name__)


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
