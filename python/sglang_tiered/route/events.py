"""``follow``: the KV events of one server (one data-parallel replica), from its replay on.

SGLang numbers its batches and replays the last ten thousand. After a gap that no replay fills, what
the server holds in device and host memory is forgotten, since removals may have been missed; pages
on disks change slowly, and are looked up by the server itself before they count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from sglang_tiered.route.pages import DEVICE, HOST, MEDIA, PageIndex

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["Publisher", "apply", "follow", "publisher_of"]

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


@dataclass(frozen=True, slots=True)
class Publisher:
    """Where events of one replica are. ``replay`` is None where the server replays none."""

    endpoint: str
    replay: str | None
    topic: str
    is_by_tenant: bool


class _Told(msgspec.Struct):
    publisher: str
    endpoint_host: str = ""
    endpoint_port_base: int = 0
    topic: str = ""
    replay_endpoint_port_base: int | None = None


class _Info(msgspec.Struct):
    kv_events: _Told | None = None
    kv_events_config: str | None = None


def publisher_of(info: bytes, url: str, rank: int) -> Publisher | None:
    """Return the publisher that the answer of ``/server_info`` names, None where the server has
    none. A host that stands for all is the server's own. Raises ``ValueError``."""
    try:
        found = msgspec.json.decode(info, type=_Info)
    except RecursionError as error:
        raise ValueError("/server_info is no JSON") from error
    told = found.kv_events
    if told is None or told.publisher != "zmq":
        return None
    host = told.endpoint_host
    if host in ("*", "0.0.0.0", "::", "[::]"):
        host = urlsplit(url).hostname or "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
    replay, base = None, told.replay_endpoint_port_base
    if base is not None:
        replay = f"tcp://{host}:{base + rank}"
    by_tenant = False
    with contextlib.suppress(ValueError, AttributeError):
        by_tenant = msgspec.json.decode(found.kv_events_config or "").get("format") == "dynamo"
    endpoint = f"tcp://{host}:{told.endpoint_port_base + rank}"
    return Publisher(endpoint, replay, told.topic, by_tenant)


def apply(index: PageIndex, server: int, payload: bytes) -> None:
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
    context: zmq.asyncio.Context, publisher: Publisher, index: PageIndex, server: int
) -> None:
    """Keep the index up to date until cancelled. Raises ``msgspec.DecodeError`` or ``zmq.ZMQError``
    for a publisher that cannot be followed."""
    with context.socket(zmq.SUB) as socket:
        _bound(socket)
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


def _bound(socket: zmq.asyncio.Socket) -> None:
    options = {zmq.MAXMSGSIZE: MAX_BATCH_BYTES, zmq.RCVHWM: MAX_WAITING, zmq.IPV6: 1, zmq.LINGER: 0}
    for option, value in options.items():
        socket.set(option, value)


async def _replay(
    context: zmq.asyncio.Context, publisher: Publisher, index: PageIndex, server: int, due: int
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
        _bound(socket)
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
