"""``Replica``: one scheduler of a server: what it told last, and which pages it holds.

What lies in device and host memory is known by SGLang's KV events, what lies on NVMe also in the
protocol in which servers tell each other. Names of pages are those of ``prompt``.

SGLang numbers its batches of events and replays the last ten thousand. After a gap that no replay
fills, what the replica holds in device and host memory is forgotten, since removals may have been
missed. Pages on disks change slowly, and are looked up by the server itself before they count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from sglang_tiered.errors import TransferError
from sglang_tiered.policy.routing import Held
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
    from collections.abc import Collection, Iterable, Sequence
    from concurrent.futures import Future

    import numpy as np
    import numpy.typing as npt

    from sglang_tiered.policy.routing import ServerState
    from sglang_tiered.policy.server_costs import EventSource, RankCosts
    from sglang_tiered.sharing.mirror import MirroredPeer


logger = logging.getLogger(__name__)

DEVICE, HOST, DISK, EXTERNAL = 1, 2, 4, 8
ALL = DEVICE | HOST | DISK | EXTERNAL
MEDIA = {None: DEVICE, "GPU": DEVICE, "CPU_PINNED": HOST, "DISK": DISK, "EXTERNAL": EXTERNAL}
"""By the names of SGLang's events."""
MAX_KNOWN = 4 << 20
"""Pages of one memory of a replica; what comes beyond is not known here."""

MAX_BATCH_BYTES, MAX_WAITING = 16 << 20, 64
"""What a server that sends faster than is read can have here: their product."""
REPLAY_S = 10.0
_END = (-1).to_bytes(8, "big", signed=True)

MAX_PAGES, MAX_SERVERS = 1 << 24, 1024
"""On NVMe. A page takes about 36 bytes up to 64 servers, however many of them hold it, and 16 for
each 64 more."""
AGAIN_S, SILENCE_S, STOP_S = 1.0, 10.0, 5.0


class HeldPages:
    """Which pages a replica holds, in which memory, as its events say: a set of names for each,
    about 100 bytes a page. Of one thread."""

    def __init__(self) -> None:
        self._memories: dict[int, set[int]] = {one: set() for one in (DEVICE, HOST, DISK, EXTERNAL)}
        self._soon: Counter[int] = Counter()

    def __len__(self) -> int:
        """Return how many pages are known in that memory which holds the most."""
        return max(map(len, self._memories.values()))

    def __getitem__(self, medium: int) -> set[int]:
        return self._memories[medium]

    def store(self, media: int, keys: Collection[int]) -> None:
        """Note that these pages are held."""
        for medium, held in self._memories.items():
            if media & medium and len(held) + len(keys) <= MAX_KNOWN:
                held.update(keys)

    def remove(self, media: int, keys: Collection[int]) -> None:
        """Note that they are held no longer."""
        for medium, held in self._memories.items():
            if media & medium:
                held.difference_update(keys)

    def forget(self, media: int = ALL) -> None:
        """Forget what is held in these memories."""
        for medium in self._memories:
            if media & medium:
                self._memories[medium] = set()

    def apply(self, payload: bytes) -> None:
        """Take in a batch of events. Raises ``msgspec.DecodeError`` for what is none."""
        for event in _DECODER.decode(payload).events:
            medium = MEDIA.get(event.medium)
            if event.type == "AllBlocksCleared":
                self.forget()
            elif medium is not None and event.type == "BlockStored":
                self.store(medium, event.block_hashes)
            elif medium is not None:
                self.remove(medium, event.block_hashes)

    def expect(self, keys: Iterable[int]) -> None:
        """Take pages for held on the device, as they will be when a request that was sent there has
        its first token; ``settle`` takes that back."""
        self._soon.update(keys)

    def settle(self, keys: Iterable[int]) -> None:
        """Leave it to events from here on."""
        self._soon.subtract(keys)
        for key in keys:
            if self._soon[key] <= 0:
                del self._soon[key]

    def own(
        self, keys: Sequence[int], bits: Sequence[int] = (), bit: int = 0
    ) -> tuple[int, int, int]:
        """Return how many leading pages are held: on the device, up to host memory, and up to NVMe.
        ``bits``: for each page, who holds it there too."""
        device, host, disk = (self._memories[one] for one in (DEVICE, HOST, DISK))
        soon, nothing = self._soon, set[int]()
        at, most, ends = 0, len(keys), []
        bit = bit if bits else 0
        for more, last, mine in ((nothing, nothing, 0), (host, nothing, 0), (host, disk, bit)):
            while at < most and (
                (key := keys[at]) in device
                or key in soon
                or key in more
                or key in last
                or (mine and bits[at] & mine)
            ):
                at += 1
            ends.append(at)
        return ends[0], ends[1], ends[2]

    def held(
        self,
        keys: Sequence[int],
        page_tokens: int,
        shared: Shared | None = None,
        *,
        bit: int = 0,
        has_peers: bool = False,
        has_bucket: bool = False,
    ) -> Held:
        """Return what the replica can have of these pages, in tokens. ``shared``: what it and those
        from which it fetches hold."""
        device, host, nvme = self.own(keys, () if shared is None else shared.bits, bit)
        peers = shared.end(nvme, DISK) if has_peers and shared is not None else nvme
        bucket = shared.end(peers, EXTERNAL) if has_bucket and shared is not None else peers
        ends = (0, device, host, nvme, peers, bucket)
        return Held(
            *((end - start) * page_tokens for start, end in zip(ends, ends[1:], strict=False))
        )


class Shared:
    """What several replicas hold of one prompt, looked up as far as it is asked for. Who had the
    last page is asked first for the next, and a run that was found is not looked for again.
    ``mask``: their bits in ``bits``, which say for each page who holds it on NVMe."""

    def __init__(
        self,
        keys: Sequence[int],
        holders: Sequence[HeldPages],
        bits: Sequence[int] = (),
        mask: int = 0,
    ) -> None:
        self._keys, self.bits, self._mask = keys, bits, mask if bits else 0
        self._memories = {
            medium: [held for one in holders if (held := one[medium])]
            for medium in (DISK, EXTERNAL)
        }
        self._run: dict[int, tuple[int, int]] = {}

    def end(self, start: int, medium: int) -> int:
        """Return where the run of pages from ``start`` ends that somebody holds in a memory."""
        first, end = self._run.get(medium, (0, -1))
        if first <= start <= end:
            return end
        held, at = self._memories[medium], start
        bits, mask = self.bits, self._mask if medium == DISK else 0
        while at < len(self._keys) and (
            (mask and bits[at] & mask) or _is_held(self._keys[at], held)
        ):
            at += 1
        self._run[medium] = start, at
        return at


def _is_held(key: int, held: list[set[int]]) -> bool:
    for place, one in enumerate(held):
        if key in one:
            if place:
                held[0], held[place] = one, held[0]
            return True
    return False


@dataclass(eq=False, slots=True)
class Replica:
    """``known`` is the ``PageFollower``'s."""

    url: str
    state: ServerState
    pages: HeldPages = field(default_factory=HeldPages)
    known: MirroredPeer | None = None
    following: tuple[asyncio.Task[None] | Future[None], ...] = ()

    @property
    def record(self) -> RankCosts:
        """Its last one."""
        return self.state.record

    @property
    def bit(self) -> int:
        """Of pages that ``PageFollower`` knows it to hold."""
        return 0 if self.known is None else 1 << self.known.slot


# ---- Events ----


class _Event(msgspec.Struct):
    type: Literal["BlockStored", "BlockRemoved", "AllBlocksCleared"]
    block_hashes: list[int] = []
    medium: str | None = None


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Event]


_DECODER = msgspec.msgpack.Decoder(_Batch)


def _reachable(endpoint: str, url: str) -> str:
    """Return an endpoint that a server tells of; a host that stands for all is its own."""
    head, _, port = endpoint.rpartition(":")
    if head.removeprefix("tcp://") not in ("*", "0.0.0.0", "::", "[::]"):
        return endpoint
    host = urlsplit(url).hostname or "127.0.0.1"
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


async def follow_events(
    context: zmq.asyncio.Context, source: EventSource, replica: Replica
) -> None:
    """Keep a replica's pages up to date until cancelled. Raises ``msgspec.DecodeError`` or
    ``zmq.ZMQError`` for a publisher that cannot be followed."""
    with context.socket(zmq.SUB) as socket:
        socket.subscribe(source.topic)
        _connect(socket, f"tcp://{source.host}:{source.port + replica.record.rank}", replica)
        # Those that come meanwhile wait in the socket.
        due = await _replay(context, source, replica, 0)
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3:
                continue
            number = int.from_bytes(frames[1], "big")
            if number < due:  # replayed already, or a publisher that began again
                continue
            if number > due:
                due = await _replay(context, source, replica, due)
            if number >= due:
                replica.pages.apply(frames[2])
                due = number + 1


def _connect(
    socket: zmq.asyncio.Socket, endpoint: str, replica: Replica, most: int = MAX_BATCH_BYTES
) -> None:
    """Take messages of so many bytes, and few at once."""
    options = {zmq.MAXMSGSIZE: most, zmq.RCVHWM: MAX_WAITING, zmq.IPV6: 1, zmq.LINGER: 0}
    for option, value in options.items():
        socket.set(option, value)
    socket.connect(_reachable(endpoint, replica.url))


async def _replay(
    context: zmq.asyncio.Context, source: EventSource, replica: Replica, due: int
) -> int:
    """Take in what was published from batch ``due`` on. Returns the number of the next."""
    first, pages = due, replica.pages
    if source.replay_port is not None:
        endpoint = f"tcp://{source.host}:{source.replay_port + replica.record.rank}"
        with context.socket(zmq.DEALER) as socket, contextlib.suppress(TimeoutError):
            _connect(socket, endpoint, replica)
            await socket.send_multipart([b"", due.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_S):  # ``wait_for`` may lose a cancellation
                    frames = await socket.recv_multipart()
                if len(frames) != 4 or frames[2] == _END:
                    break
                number = int.from_bytes(frames[2], "big")
                if number > due and first:  # before any, nothing was known that could be wrong
                    pages.forget(DEVICE | HOST)
                    logger.info("%s: events were lost; its memory is learnt anew", replica.url)
                pages.apply(frames[3])
                due = number + 1
    if first and due == first:  # nobody filled the gap
        pages.forget(DEVICE | HOST)
    return due


# ---- NVMe ----


class PageFollower:
    """Which pages replicas hold on NVMe. ``start`` and ``bits`` are the event loop's that owns it;
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

    def start(self, replica: Replica) -> Future[None]:
        """Follow a replica until the future is cancelled. The slot of its ``known`` is its bit."""
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

    async def _keep(self, replica: Replica) -> None:
        known = self._mirror.join(secrets.token_hex(), "")
        if known is None:  # more than ``MAX_SERVERS``
            return
        replica.known = known
        try:
            while True:
                record = replica.record
                if record.pages_at and record.namespace and not record.keyed:
                    try:
                        await self._follow(replica, known)
                    except Exception as error:  # whatever is wrong with a server, it is asked again
                        self._report(replica, str(error) or type(error).__name__)
                        self._mirror.unload(known)
                await asyncio.sleep(AGAIN_S)
        finally:
            self._mirror.drop(known)
            self._told.pop(replica.url, None)

    async def _follow(self, replica: Replica, known: MirroredPeer) -> None:
        """Keep a replica's pages. Raises ``TransferError``, ``zmq.ZMQError``, or ``TimeoutError``
        once it says nothing, for one that cannot be followed."""
        known.epoch, known.cursor, told = 0, 0, UNTOLD  # of another process, perhaps
        namespace = bytes.fromhex(replica.record.namespace)
        with self._context.socket(zmq.DEALER) as socket:
            _connect(socket, replica.record.pages_at, replica, MAX_FOLLOW_FRAME_BYTES)
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

    def _report(self, replica: Replica, why: str) -> None:
        if why != self._told.get(replica.url):
            logger.info("pages of %s are not followed: %s", replica.url, why)
        self._told[replica.url] = why
