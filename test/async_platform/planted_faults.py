"""Faults on SGLang's real pools and copies, one at a time: what does the platform say?

A process of its own, since the platform takes the place of torch's streams: its last line is JSON,
the violations by fault. Nothing becomes visible before it is awaited.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from page_calls import load_pages, store_pages
from small_cache import DIM, HEADS, LAYERS, PAGE, keys_of, make_cache

if TYPE_CHECKING:
    import torch

FAULTS: dict[str, tuple[Callable[[World], None], set[str]]] = {}
"""Each with the violations that it must lead to, and no others."""


def noticed_as(*violations: str) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    def register(plant: Callable[[World], None]) -> Callable[[World], None]:
        FAULTS[plant.__name__] = plant, set(violations)
        return plant

    return register


class World:
    """A cache's pools, its controller and tier, and forwards over them."""

    def __init__(self, folder: str) -> None:
        import device as streams
        import forwards
        import torch
        from seams import BED, pages_of, slots_of

        self.streams, self.bed = streams, BED
        cache = make_cache(folder, ExitStack())
        self.controller, self.storage = cache.cache_controller, cache.storage
        self.allocator = cache.token_to_kv_pool_allocator
        self.pool = self.allocator.get_kvcache()
        self.host = self.controller.mem_pool_host.anchor_entry.host_pool
        self.forward_stream, self.scheduling = torch.cpu.Stream(), torch.cpu.Stream()
        self.controller.load_fence_stream = self.forward_stream
        self.controller.write_fence_stream = self.forward_stream
        self.table = torch.zeros(4, self.pool.size, dtype=torch.int64)
        runner = SimpleNamespace(
            forward_stream=self.forward_stream,
            token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
        )
        forward = forwards.late(BED, slots_of)(self._compute)
        self._forward = lambda batch: forward(runner, batch)
        self.pages: Any = pages_of(self.host)
        self.seen: list[torch.Tensor] = []
        self.keys = keys_of(list(range(2 * PAGE)))

    def forward(self, writes: torch.Tensor, reads: Any = None, consumer: int = -1) -> None:
        """Compute tokens whose prefix is in ``reads``, which it reads layer by layer."""
        import torch
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        tokens = writes if reads is None else torch.cat([reads, writes])
        self.table[1, : len(tokens)] = tokens
        self.controller.layer_done_counter.set_consumer(consumer)
        batch = SimpleNamespace(
            out_cache_loc=writes,
            req_pool_indices=torch.tensor([1]),
            seq_lens=torch.tensor([len(tokens)]),
            forward_mode=ForwardMode.EXTEND,
            prefix=reads,
        )
        with self.streams.StreamContext(self.forward_stream):
            self.forward_stream.wait_stream(self.scheduling)
            self._forward(batch)

    def _compute(self, runner: Any, batch: Any) -> None:
        import torch

        self.seen = []
        for layer in range(LAYERS):
            keys = self.pool.get_key_buffer(layer)
            if batch.prefix is not None:
                self.seen.append(keys[batch.prefix].clone())
            for buffer in (self.pool.k_buffer[layer], self.pool.v_buffer[layer]):
                buffer[batch.out_cache_loc] = torch.randn(len(batch.out_cache_loc), HEADS, DIM)

    def computed(self, num_pages: int = 2) -> torch.Tensor:
        """Slots of pages that a forward has written."""
        slots: torch.Tensor = self.allocator.alloc(num_pages * PAGE)
        self.forward(slots)
        return slots

    def backed_up(self, num_pages: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        """Computed pages whose host copy is done: slots on the device and in host memory."""
        slots = self.computed(num_pages)
        host = self.controller.write(slots)
        self.bed.device.synchronize()
        return slots, host

    def load_back(self, host: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Begin a load back: slots, and who may wait for it."""
        slots: torch.Tensor = self.controller.load(host)
        return slots, self.controller.start_loading()

    def store(self, host: torch.Tensor) -> list[bool]:
        return store_pages(self.storage, self.keys, host)

    def is_poison(self, host: torch.Tensor) -> bool:
        return bool(self.pages.holds_poison(int(host[0]) // PAGE))

    def write_host(self, host: torch.Tensor) -> None:
        """Somebody's late write."""
        self.pages.views(int(host[0]) // PAGE)[0][77] += 1


@noticed_as()
def everything_in_order(world: World) -> None:
    import torch

    slots = world.computed()
    world.bed.device.synchronize()
    before = world.pool.k_buffer[3][slots].clone()
    host = world.controller.write(slots)
    world.bed.device.synchronize()
    assert world.store(host) == [True, True]
    world.allocator.free(slots)
    world.host.free(host)
    host = world.host.alloc(2 * PAGE)
    assert load_pages(world.storage, world.keys, host) == [True, True]
    slots, consumer = world.load_back(host)
    assert not torch.equal(world.pool.k_buffer[3][slots], before), "it was not awaited"
    new = world.allocator.alloc(PAGE)
    world.forward(new, slots, consumer)
    assert torch.equal(world.seen[3], before)
    world.bed.device.synchronize()
    world.host.free(host)
    world.allocator.free(torch.cat([slots, new]))


@noticed_as("store-before-copy-is-done", "store-of-poison")
def store_of_a_node_whose_copy_is_queued(world: World) -> None:
    world.store(world.controller.write(world.computed()))


@noticed_as("store-of-poison")
def store_of_a_page_of_which_a_row_was_never_written(world: World) -> None:
    _, host = world.backed_up()
    world.pages.views(int(host[0]) // PAGE)[1][DIM * 8 : DIM * 9] = 0x4240C240
    world.store(host)


@noticed_as("host-page-changed-during-store")
def page_written_while_it_is_stored(world: World) -> None:
    _, host = world.backed_up()
    finish = world.storage.end_store
    world.storage.end_store = lambda begun: (world.write_host(host), finish(begun))[1]
    world.store(host)


@noticed_as("load-into-free-host-page")
def load_from_disk_into_a_page_that_was_freed(world: World) -> None:
    _, host = world.backed_up()
    world.store(host)
    world.host.free(host)
    assert load_pages(world.storage, world.keys, host) == [True, True]


@noticed_as("h2d-before-copy-is-done")
def load_back_of_a_node_whose_copy_is_queued(world: World) -> None:
    world.load_back(world.controller.write(world.computed()))


@noticed_as("h2d-of-free-host-page")
def load_back_of_a_page_that_was_freed(world: World) -> None:
    _, host = world.backed_up()
    world.host.free(host)
    world.load_back(host)


@noticed_as("host-free-while-written")
def host_page_freed_under_its_copy(world: World) -> None:
    world.host.free(world.controller.write(world.computed()))


@noticed_as("host-free-while-read")
def host_page_freed_under_its_load_back(world: World) -> None:
    _, host = world.backed_up()
    world.load_back(host)
    world.host.free(host)


@noticed_as("host-clear-in-flight")
def flush_under_a_copy(world: World) -> None:
    world.controller.write(world.computed())
    world.host.clear()


@noticed_as("host-page-written-after-free")
def host_page_written_after_it_was_freed(world: World) -> None:
    _, host = world.backed_up()
    world.host.free(host)
    world.write_host(host)
    world.host.alloc(world.host.available_size())


@noticed_as("d2h-into-host-page-in-use")
def two_copies_into_one_host_page(world: World) -> None:
    from sglang.srt.managers.cache_controller import CacheOperation

    slots = world.computed()
    host = world.controller.write(slots)
    world.controller.write_queue.append(CacheOperation(host, slots, -1))
    world.controller.start_writing()


@noticed_as("unaligned-page", "copy-failed")
def slots_that_are_no_page(world: World) -> None:
    world.controller.write(world.computed()[PAGE // 2 : -PAGE // 2])


@noticed_as("d2h-not-ordered-after-writer")
def copy_without_a_fence_behind_its_forward(world: World) -> None:
    world.controller.write_fence_stream = None
    host = world.controller.write(world.computed())
    world.controller.ack_write_queue[-1].finish_event.synchronize()
    assert world.is_poison(host), "the forward is under way"


@noticed_as("h2d-into-slots-in-use")
def load_back_without_a_fence_into_slots_that_a_forward_writes(world: World) -> None:
    _, host = world.backed_up(1)
    world.controller.load_fence_stream = None
    world.allocator.free(world.computed(world.allocator.available_size() // PAGE))
    world.load_back(host)


@noticed_as("h2d-into-slots-in-use")
def load_back_without_a_fence_into_slots_that_a_forward_reads(world: World) -> None:
    slots, host = world.backed_up(world.allocator.available_size() // PAGE - 1)
    world.controller.load_fence_stream = None
    world.forward(world.allocator.alloc(PAGE), slots)
    world.allocator.free(slots)
    world.load_back(host)


@noticed_as("forward-into-slots-in-use")
def forward_into_slots_that_are_copied(world: World) -> None:
    slots = world.computed()
    world.controller.write(slots)
    world.forward(slots)


@noticed_as("forward-read-before-load")
def forward_that_does_not_wait_for_its_load(world: World) -> None:
    _, host = world.backed_up(1)
    slots, _ = world.load_back(host)
    world.forward(world.allocator.alloc(PAGE), slots, consumer=-1)


@noticed_as("device-free-while-copied")
def device_pages_freed_before_their_copy(world: World) -> None:
    slots = world.computed()
    world.bed.device.synchronize()
    host = world.controller.write(slots)
    world.allocator.free(slots)
    world.bed.device.synchronize()
    assert world.is_poison(host)


@noticed_as("device-free-while-loaded")
def device_pages_freed_before_their_load(world: World) -> None:
    _, host = world.backed_up()
    slots, _ = world.load_back(host)
    world.allocator.free(slots)


def main(names: Iterable[str]) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from seams import BED

    found = {}
    for name in names:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # may be written
            try:
                FAULTS[name][0](World(folder))
                BED.device.synchronize()
            except Exception:
                BED.report.violation(traceback.format_exc())
            found[name] = sorted(set(BED.report.take()))
    print(json.dumps({"found": found, "ran": dict(BED.report.runs)}), flush=True)
    os._exit(0)  # what was broken on purpose is not taken down in order


if __name__ == "__main__":
    main(sys.argv[1:] or FAULTS)
