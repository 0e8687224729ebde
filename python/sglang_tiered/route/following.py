"""``PageFollower``: which pages servers hold on NVMe, in the protocol that they tell each other in.

A picker asks as another server would (``Follow``): for all names first, then for what came and
went. So it knows them after a restart too. What was erased is told to be gone; of erasures it hears
nothing else. Servers with keys (``--tier-peer-keys``) are not followed: their key opens pages.

Coroutines on a thread of their own, as a table that grows takes seconds. Look-ups take no lock.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING, Protocol

import zmq
import zmq.asyncio

from sglang_tiered.errors import TransferError
from sglang_tiered.route.events import bound, reachable
from sglang_tiered.sharing.mirror import Mirror, Peer
from sglang_tiered.sharing.pages.messages import (
    ID_BYTES,
    MAX_FOLLOW_FRAME_BYTES,
    VERSION_FRAME,
    Changes,
    decode_from_server,
    encode,
)
from sglang_tiered.sharing.position import Position

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy as np
    import numpy.typing as npt

    from sglang_tiered.policy.server_costs import RankCosts
    from sglang_tiered.sharing.mirror import MirroredPeer

__all__ = ["PageFollower"]

MAX_PAGES, MAX_SERVERS = 1 << 24, 1024
"""A page takes about 36 bytes up to 64 servers, however many of them hold it, and 16 for each 64
more."""
AGAIN_S, SILENCE_S, STOP_S = 1.0, 10.0, 5.0

logger = logging.getLogger(__name__)


class Followed(Protocol):
    """A replica of a server at ``url``: its last record, and what is known of its pages."""

    record: RankCosts
    known: MirroredPeer | None

    @property
    def url(self) -> str: ...


class PageFollower:
    """``start`` and ``bits`` are the event loop's that owns it; ``close`` it."""

    def __init__(self) -> None:
        self._mirror = Mirror(MAX_PAGES, MAX_SERVERS, salt=0, digest=bytes, clock=time.monotonic)
        self._id = secrets.token_bytes(ID_BYTES)
        self._told: dict[str, str] = {}  # what is wrong with a server, by URL
        self._loop: asyncio.AbstractEventLoop | None = None  # before there is a server

    def start(self, replica: Followed) -> Future[None]:
        """Follow a server until the future is cancelled. The slot of its ``known`` is
        its bit."""
        if self._loop is None:
            self._loop, self._context = asyncio.SelectorEventLoop(), zmq.asyncio.Context()
            self._thread = threading.Thread(target=self._loop.run_forever, name="pages")
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
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(STOP_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)
            self._context.destroy(linger=0)
            self._loop.close()

    # ---- Its thread ----

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _keep(self, replica: Followed) -> None:
        known = self._mirror.join(Peer(secrets.token_hex(), ""))
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
        position = Position(self._mirror)
        with self._context.socket(zmq.DEALER) as socket:
            bound(socket, MAX_FOLLOW_FRAME_BYTES)
            socket.connect(where)
            while True:
                question = position.ask(namespace, self._id, bytes(ID_BYTES))
                await socket.send_multipart([VERSION_FRAME, encode(question)])
                async with asyncio.timeout(SILENCE_S):
                    frames = await socket.recv_multipart()
                message = decode_from_server(frames)
                if not isinstance(message, Changes) or message.namespace != namespace:
                    raise TransferError("it has another model, or other settings or weights")
                position.hear(message)
                position.take(known, message, frames[2:])
                if known.is_cut:
                    self._report(replica, f"there are more than {MAX_PAGES:,} pages")
                elif known.is_loaded:
                    self._told.pop(replica.url, None)

    def _report(self, replica: Followed, why: str) -> None:
        if why != self._told.get(replica.url):
            logger.info("pages of %s are not followed: %s", replica.url, why)
        self._told[replica.url] = why
