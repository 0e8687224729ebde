"""A prefill and a decode endpoint over pools of random bytes, and what they report."""

from __future__ import annotations

import threading
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sglang_tiered.config import TransferConfig
from sglang_tiered.transfer.decode import DecodeEndpoint
from sglang_tiered.transfer.layout import heads_of_rank
from sglang_tiered.transfer.memory import Buffer, HostMemory, Memories
from sglang_tiered.transfer.messages import NOTHING_MORE, Asked, KVLayout, StateLayout
from sglang_tiered.transfer.prefill import PrefillEndpoint
from sglang_tiered.transfer.send_queue import Chunk
from sglang_tiered.wire.keys import load_keys, make_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from sglang_tiered.wire.keys import Keys

DEADLINE_S = 20.0
MODEL = b"m" * 32  # of every endpoint unless a test says otherwise
HOST = "127.0.0.1"

TCP = TransferConfig(same_host=False)
SAME_HOST = TransferConfig()
IMPATIENT = msgspec.structs.replace(
    TCP, ping_interval_s=0.2, peer_timeout_s=1.0, connect_timeout_s=1.0, progress_timeout_s=1.0
)


@dataclass(frozen=True)
class Shape:
    """A model's KV on one rank: K and V buffers of ``num_layers`` layers, in pages."""

    num_layers: int = 2
    page_size: int = 4
    num_pages: int = 64
    num_heads: int = 4
    head_bytes: int = 32
    tp_rank: int = 0
    tp_size: int = 1
    latent: bool = False  # one buffer per layer, the same on all ranks
    states: tuple[tuple[str, int], ...] = ()  # kind and bytes of a row
    first_layer: int = 0
    dtype: str = "bfloat16"
    codec: str = "none"

    @property
    def heads(self) -> range:
        return heads_of_rank(self.tp_rank, self.tp_size, self.num_heads)


class Pool:
    """Buffers with the bytes of their own, and the layout that describes them."""

    def __init__(self, shape: Shape, seed: int | None = None) -> None:
        source = np.random.default_rng(seed)

        def random_bytes(size: tuple[int, ...]) -> Any:
            return source.integers(0, 256 if seed is not None else 1, size, dtype=np.uint8)

        heads = 1 if shape.latent else len(shape.heads)
        per_layer = 1 if shape.latent else 2
        token = heads * shape.head_bytes
        size = (shape.num_layers * per_layer, shape.num_pages, shape.page_size, token)
        self.shape = shape
        self.kv = random_bytes(size)
        if shape.codec != "none":
            self.kv //= 64  # random bytes cannot be made smaller
        self.states = [random_bytes((3, 8, num_bytes)) for _, num_bytes in shape.states]
        self.aux = np.zeros((2, 16, 24), np.uint8)
        self.memories = Memories(
            memory_of(self.kv), [memory_of(state) for state in self.states], memory_of(self.aux)
        )
        layers = range(shape.first_layer, shape.first_layer + shape.num_layers)
        self.layout = KVLayout(
            shape.page_size,
            shape.dtype,
            [shape.page_size * token] * len(self.kv),
            [*layers] * per_layer,
            shape.tp_rank,
            shape.tp_size,
            0 if shape.latent else shape.num_heads,
            [StateLayout(kind, [num_bytes] * 3) for kind, num_bytes in shape.states],
            [24, 24],
            shape.dtype,
            shape.codec,
        )

    def pages(self, numbers: Sequence[int]) -> Any:
        """[buffer, page, token, bytes]"""
        return self.kv[:, list(numbers)]


def whole_kv(shape: Shape, num_layers: int) -> Any:
    """[K or V, layer, page, token, head, byte]: the KV of a whole model, no byte by chance."""
    size = (num_layers, shape.num_pages, shape.page_size, shape.num_heads, shape.head_bytes)
    return np.random.default_rng(7).integers(1, 256, (2, *size), dtype=np.uint8)


def share_of(whole: Any, shape: Shape) -> Any:
    """[buffer, page, token, bytes]: what one rank holds of it, all K, then all V."""
    layers = slice(shape.first_layer, shape.first_layer + shape.num_layers)
    part = whole[:, layers][..., list(shape.heads), :]
    return part.reshape(2 * shape.num_layers, shape.num_pages, shape.page_size, -1)


def sources_of(rank: int, prefill_tp: int, decode_tp: int) -> range:
    """The prefill ranks that SGLang has a decode rank ask."""
    if decode_tp >= prefill_tp:
        first = rank // (decode_tp // prefill_tp)
        return range(first, first + 1)
    group = prefill_tp // decode_tp
    return range(rank * group, (rank + 1) * group)


def memory_of(array: Any) -> HostMemory:
    """``array`` is [buffer, row, ...]."""
    row = array[0, 0].nbytes
    return HostMemory([Buffer(part.ctypes.data, part.nbytes, row) for part in array])


@dataclass
class Recorder:
    """A listener of either side. ``wait_for`` is how tests wait: never by sleeping."""

    events: list[tuple[Any, ...]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def _note(self, *event: Any) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def room_ready(self, room: int, prefix_tokens: int) -> None:
        self._note("ready", room, prefix_tokens)

    def room_dropped(self, room: int) -> None:
        """It ended before."""

    def room_done(self, room: int) -> None:
        self._note("done", room)

    def room_failed(self, room: int, reason: str) -> None:
        self._note("failed", room, reason)

    def prefill_lost(self, address: tuple[str, int], reason: str) -> None:
        self._note("lost", address, reason)

    def wait_for(self, kind: str, room: Any = None, timeout_s: float = DEADLINE_S) -> Any:
        """The first event of this kind (and room), once there is one."""
        seen = 0  # looked at once each: thousands of events come while the condition is held

        def found() -> tuple[Any, ...] | None:
            nonlocal seen
            while seen < len(self.events):
                event = self.events[seen]
                seen += 1
                if event[0] == kind and (room is None or event[1] == room):
                    return event
            return None

        with self.changed:
            event = self.changed.wait_for(found, timeout_s)
            assert event, f"no {kind} of {room} within {timeout_s} s, only {self.events[-5:]}"
            return event

    def kinds(self, room: int) -> list[str]:
        with self.changed:
            return [event[0] for event in self.events if event[1] == room]


@dataclass
class Prefill:
    pool: Pool
    endpoint: PrefillEndpoint
    events: Recorder

    @property
    def address(self) -> tuple[str, int]:
        return HOST, self.endpoint.control_port

    def send(
        self,
        room: int,
        pages: Sequence[int],
        *,
        start: int = 0,
        is_last: bool = True,
        state_rows: Sequence[Any] = (),
        aux_row: int | None = 1,
    ) -> None:
        rows = [None if item is None else indices(item) for item in state_rows]
        chunk = Chunk(indices(pages), start, is_last, rows, aux_row if is_last else None)
        self.endpoint.send_chunk(room, chunk)


@dataclass
class Decode:
    pool: Pool
    endpoint: DecodeEndpoint
    events: Recorder

    def claim(self, room: int, prefills: Sequence[Prefill]) -> None:
        self.endpoint.claim_room(room, [item.address for item in prefills])

    def open(
        self,
        room: int,
        prefills: Sequence[Prefill | tuple[str, int]],
        pages: Sequence[int],
        *,
        state_rows: Sequence[Any] = (),
        aux_row: int | None = 2,
        num_receivers: int = 1,
        prefix_tokens: int = 0,
        dummies: Sequence[int] = (),
        asked: Asked = NOTHING_MORE,
    ) -> None:
        targets = [item if isinstance(item, tuple) else item.address for item in prefills]
        self.endpoint.open_room(
            room,
            targets,
            dummies=[targets[index] for index in dummies],
            pages=indices(pages),
            state_rows=[None if item is None else indices(item) for item in state_rows],
            aux_row=aux_row,
            prefix_tokens=prefix_tokens,
            num_receivers=num_receivers,
            asked=asked,
        )


def indices(numbers: Sequence[int]) -> Any:
    return np.array(list(numbers), np.int32)


def pair_keys(folder: Path) -> dict[str, Keys]:
    """New ones, by role."""
    make_keys(folder)
    return {role: load_keys(folder, role) for role in ("prefill", "decode")}


@contextmanager
def prefill(
    shape: Shape = Shape(),
    *,
    settings: TransferConfig = TCP,
    seed: int = 1,
    keys: Keys | None = None,
    rank: int = 0,
    model: bytes | None = MODEL,
) -> Iterator[Prefill]:
    pool, events = Pool(shape, seed), Recorder()
    endpoint = PrefillEndpoint(
        host=HOST,
        server=f"{HOST}:30000",
        layout=pool.layout,
        memories=pool.memories,
        rank=rank,
        listener=events,
        on_ready=events.room_ready,
        settings=settings,
        keys=keys,
    )
    endpoint.set_model(model)
    with closing(endpoint):
        yield Prefill(pool, endpoint, events)


@contextmanager
def decode(
    shape: Shape = Shape(),
    *,
    settings: TransferConfig = TCP,
    keys: Keys | None = None,
    model: bytes | None = MODEL,
) -> Iterator[Decode]:
    pool, events = Pool(shape), Recorder()
    endpoint = DecodeEndpoint(
        server=f"{HOST}:30001",
        layout=pool.layout,
        memories=pool.memories,
        listener=events,
        on_lost=events.prefill_lost,
        settings=settings,
        keys=keys,
    )
    endpoint.set_model(model)
    with closing(endpoint):
        yield Decode(pool, endpoint, events)


def meet(
    sender: Prefill,
    receiver: Decode,
    room: int = 1,
    pages: Sequence[int] = (1, 2),
    at: tuple[str, int] | None = None,
) -> None:
    """A room that both have, by way of an address."""
    sender.endpoint.expect_room(room)
    receiver.open(room, [at or sender], pages)
    sender.events.wait_for("ready", room)


def hold(endpoint: Any) -> threading.Event:
    """Hold an endpoint's thread until the event is set."""
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        leave.wait(DEADLINE_S)

    endpoint._loop.call(wait)
    assert entered.wait(DEADLINE_S)
    return leave


def hand_over(sender: Prefill, receiver: Decode, room: int = 1) -> None:
    """Pages 8 and 9 of one to 1 and 2 of the other, as they are."""
    meet(sender, receiver, room)
    sender.send(room, [8, 9])
    receiver.events.wait_for("done", room)
    sender.events.wait_for("done", room)
    assert np.array_equal(receiver.pool.pages([1, 2]), sender.pool.pages([8, 9]))
    receiver.endpoint.close_room(room)
