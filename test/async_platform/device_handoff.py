"""Pages out of and into a device's pool, where no copy is done before it is waited for: the
handoff's, and those between a device and host pools without SGLang's kernels.

A process of its own, since the platform takes the place of torch's streams: its last line is JSON,
whether all bytes were right as the code is, and with each of its waits taken away.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import device as streams
import numpy as np
from xxhash import xxh3_64_intdigest

from sglang_tiered.transfer.decode import DecodeEndpoint
from sglang_tiered.transfer.layout import whole_pieces
from sglang_tiered.transfer.memory import Buffer, HostMemory, Memories, SlabPiece
from sglang_tiered.transfer.messages import KV_COMPONENT, PLAIN, KVLayout, Open, Slab
from sglang_tiered.transfer.same_host import Fence
from sglang_tiered.transfer.send_queue import Chunk, SendQueue, SlabBuffers, cut_slabs
from sglang_tiered.wire.keys import Tagger

PAGES, PAGE_BYTES, BUFFERS = 8, 1 << 21, 4
"""So that five pages are more slabs than have memory on the device."""

CHOSEN = [7, 0, 3, 5, 2]

LAYOUT = KVLayout(64, "uint8", [PAGE_BYTES] * BUFFERS, [*range(BUFFERS)], 0, 1, 0, [], [])


class World:
    """A prefill rank's pool of random bytes on a lazy device, and the queue to one decode rank."""

    def __init__(self) -> None:
        import torch

        from sglang_tiered.integration.disaggregation import device_memory

        self.torch = torch
        size = (BUFFERS, PAGES, PAGE_BYTES)
        self.pool = np.random.default_rng(1).integers(1, 256, size, dtype=np.uint8)
        buffers = [Buffer(part.ctypes.data, part.nbytes, PAGE_BYTES) for part in self.pool]
        self.memory = device_memory.DeviceMemory(buffers, "cpu")
        self.memory._computing.called("computing", lazy=True)
        self.memory._copying.called("copying", lazy=True)

        def later(operation: Callable[..., None]) -> Callable[..., None]:
            return lambda *given: streams.current_stream().copy(partial(operation, *given))

        self.module = SimpleNamespace(gather=device_memory.gather, scatter=device_memory.scatter)
        device_memory.gather = later(self.module.gather)  # type: ignore[assignment]
        device_memory.scatter = later(self.module.scatter)  # type: ignore[assignment]
        self.memory._copy_out = later(self.memory._copy_out)  # type: ignore[method-assign]

    def is_sent_right(self, done: Callable[..., Any] | None = None) -> bool:
        """Send pages whose numbers are still being written; compare what would go out. ``done``
        stands for what asks the events."""
        from sglang_tiered.integration.disaggregation.device_memory import are_done

        numbers = self.torch.zeros(len(CHOSEN), dtype=self.torch.int64)
        chosen = self.torch.tensor(CHOSEN)
        scheduling = self.torch.cpu.Stream()
        scheduling.called("scheduling", lazy=True)
        scheduling.copy(lambda: numbers.copy_(chosen) and None)
        event = self.torch.cpu.Event()
        event.record(scheduling)

        memories = Memories(self.memory, [], HostMemory([]))
        pairs = [(piece, piece) for piece in whole_pieces(self.memory.buffers)]
        buffers = SlabBuffers(self.memory.new_buffer)
        queue = SendQueue(memories, pairs, LAYOUT, Tagger(b""), buffers, 1 << 30)
        is_computed = (done or are_done)(None, event)
        chunk = Chunk(numbers.numpy(), 0, is_last=True, is_computed=is_computed)
        queue.add_chunk(Open(1, 1, len(CHOSEN), [], 0, 1, False, bytes(32)), chunk, Fence())

        payloads = []
        parcel = queue.next_parcel()
        if parcel is None and queue.awaits_compute:
            event.synchronize()  # time goes by
            parcel = queue.next_parcel()
        while parcel is not None and not parcel.is_last:
            payloads.append(np.array(parcel.frames[-1]))
            parcel = queue.next_parcel()
        expected = []
        for spec in cut_slabs(len(CHOSEN), [PAGE_BYTES] * BUFFERS, 64):
            part = slice(spec.first_pair, spec.first_pair + spec.num_pairs)
            pages = CHOSEN[spec.start : spec.start + spec.num_pages]
            expected.append(self.pool[part][:, pages].reshape(-1))
        assert len(expected) > 4, "too few slabs for their memory to be used again"
        same = map(np.array_equal, payloads, expected)
        return len(payloads) == len(expected) and all(same)

    def is_sent_to_many_right(self) -> bool:
        """Slabs for four decode ranks begun at once, the last awaited first."""
        placed, begun = self.memory.place(np.array(CHOSEN, np.int32)), []
        for index in range(BUFFERS):
            out = np.zeros(PAGE_BYTES, np.uint8)
            wait = self.memory.begin_gather([SlabPiece(index, PAGE_BYTES)], placed[:1], out)
            begun.append((wait, out, self.pool[index, CHOSEN[0]]))
        for wait, *_ in reversed(begun):
            wait()
        return all(np.array_equal(out, expected) for _, out, expected in begun)

    def is_received_right(self, *, without: str = "") -> bool:
        """A slab lands in pages that the device still writes: a forward whose request has ended,
        and what the scheduler queued last. ``without``: the one of them that nobody knows of."""
        from sglang_tiered.integration.disaggregation.manager import DecodeKVManager, ZmqKVReceiver

        torch = self.torch
        forward, scheduling = torch.cpu.Stream(), torch.cpu.Stream()
        for name, stream, buffer in (("forward", forward, 1), ("scheduling", scheduling, 3)):
            stream.called(name, lazy=True)
            stream.copy(partial(self.pool[buffer, CHOSEN[0]].fill, 0))
        endpoint: Any = DecodeEndpoint.__new__(DecodeEndpoint)  # without its thread
        endpoint._memories, endpoint._rooms = Memories(self.memory, [], HostMemory([])), {}
        endpoint._table_lock, endpoint._generations = threading.Lock(), itertools.count(1)
        endpoint._loop = SimpleNamespace(call=nothing)
        receiver: Any = ZmqKVReceiver.__new__(ZmqKVReceiver)
        receiver.kv_mgr = manager = DecodeKVManager.__new__(DecodeKVManager)
        receiver.bootstrap_room, receiver.bootstrap_infos = 1, []
        receiver.required_dst_info_num, manager.endpoint = 1, endpoint
        manager.forward_stream = torch.cpu.Stream() if without == "forward" else forward
        with streams.StreamContext(None if without == "scheduling" else scheduling):
            receiver.send_metadata(CHOSEN)

        size = 2 * len(CHOSEN) * PAGE_BYTES
        data = np.random.default_rng(2).integers(1, 256, size, dtype=np.uint8)
        sent = data.copy()
        slab = Slab(1, 1, 0, KV_COMPONENT, 0, 2, 0, len(CHOSEN), PLAIN, xxh3_64_intdigest(sent))
        pairs = [(piece, piece) for piece in whole_pieces(self.memory.buffers)[1::2]]
        assert endpoint._rooms[1].land(slab, sent, pairs, LAYOUT)
        sent[:] = 0  # the frame is the socket's again
        forward.synchronize()
        scheduling.synchronize()
        return np.array_equal(self.pool[[1, 3]][:, CHOSEN].reshape(-1), data)

    def is_loaded_right(self, *, awaited: bool = True) -> bool:
        """Host to device and back, layer by layer; SGLang takes its indices back at once."""
        import sglang.srt.utils  # noqa: F401 - as a server has, before a module of a platform

        from sglang_tiered.integration.platforms import host_copies

        torch, layers, page = self.torch, 3, 4
        generator = torch.Generator().manual_seed(3)
        size = (PAGES, layers, page, 2, 8)
        host = [torch.randn(size, generator=generator) for _ in range(2)]
        device = [torch.zeros(PAGES * page, 2, 8) for _ in range(2 * layers)]
        back = [torch.zeros(size) for _ in range(2)]
        original = host_copies.copy_between
        stream = torch.cpu.Stream()
        stream.called("loading", lazy=True)

        def later(*given: Any, **options: Any) -> None:
            stream.copy(lambda: original(*given, **options) and None)

        host_copies.copy_between = later  # type: ignore[assignment]
        try:
            indices = torch.cat([torch.arange(page) + page * one for one in CHOSEN])
            for layer in range(layers):
                host_copies.transfer_kv_per_layer_direct_pf_lf(
                    host, device[layer::layers], indices, indices, layer, page
                )
            host_copies.transfer_kv_all_layer_direct_lf_pf(device, back, indices, indices, page)
            indices.zero_()
            event = torch.cpu.Event()
            event.record(stream)
            if awaited:
                event.synchronize()
        finally:
            host_copies.copy_between = original
        return all(torch.equal(b[CHOSEN], h[CHOSEN]) for b, h in zip(back, host, strict=True))


def nothing(*_: Any) -> None:
    """In place of a wait."""


def as_it_is(world: World) -> bool:
    handed_over = world.is_sent_right() and world.is_sent_to_many_right()
    return handed_over and world.is_received_right() and world.is_loaded_right()


def copy_is_not_awaited(world: World) -> bool:
    begin = world.memory.begin_gather
    world.memory.begin_gather = lambda *given: (begin(*given), nothing)[1]  # type: ignore[method-assign]
    return world.is_sent_right()


def lacking(place: str, name: str, what: str) -> Callable[[World], bool]:
    """What is right where one wait does nothing."""

    def check(world: World) -> bool:
        setattr(attrgetter(place)(world), name, nothing)
        right: bool = getattr(world, what)()
        return right

    return check


FAULTS: dict[str, Callable[[World], bool]] = {
    "numbers are not awaited": lambda world: world.is_sent_right(lambda *_: lambda: True),
    "a copy is not awaited": copy_is_not_awaited,
    "a copy before its gather": lacking("memory._copying", "wait_event", "is_sent_right"),
    "a gather before the last copy": lacking(
        "memory._computing", "wait_event", "is_sent_to_many_right"
    ),
    "a scatter is not awaited": lacking("memory", "flush", "is_received_right"),
    "a forward is not awaited": lambda world: world.is_received_right(without="forward"),
    "the scheduler is not awaited": lambda world: world.is_received_right(without="scheduling"),
    "a load is not awaited": lambda world: world.is_loaded_right(awaited=False),
}


def main() -> None:
    from sglang_tiered.integration.disaggregation import device_memory

    said = {}
    for name, case in {"as it is": as_it_is, **FAULTS}.items():
        gather, scatter = device_memory.gather, device_memory.scatter
        world = World()
        said[name] = case(world)
        world.torch.cpu.synchronize()  # what it did not await reads memory of this world
        device_memory.gather, device_memory.scatter = gather, scatter
    print(json.dumps(said))


if __name__ == "__main__":
    main()
