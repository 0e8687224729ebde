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
from collections.abc import Iterable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from page_calls import load_pages, store_pages
from small_cache import DIM, HEADS, LAYERS, PAGE, keys_of, make_cache

if TYPE_CHECKING:
    import torch

FAULTS: dict[str, tuple[str, set[str]]] = {}
"""Steps of a ``World``, each with the violations that they must lead to, and no others."""

for _line in """\
store of a node whose copy is queued | computes copies stores | store-before-copy-is-done store-of-poison
store of a page of which a row was never written | computes copies waits spoils stores | store-of-poison
page written while it is stored | computes copies waits writes_meanwhile stores | host-page-changed-during-store
load from disk into a page that was freed | computes copies waits stores frees_host loads | load-into-free-host-page
load back of a node whose copy is queued | computes copies loads_back | h2d-before-copy-is-done
load back of a page that was freed | computes copies waits frees_host loads_back | h2d-of-free-host-page
host page freed under its copy | computes copies frees_host | host-free-while-written
host page freed under its load back | computes copies waits loads_back frees_host | host-free-while-read
flush under a copy | computes copies flushes | host-clear-in-flight
host page written after it was freed | computes copies waits frees_host writes_host fills_host | host-page-written-after-free
two copies into one host page | computes copies copies_again | d2h-into-host-page-in-use
slots that are no page | computes misaligns copies | unaligned-page copy-failed
copy without a fence behind its forward | unfences computes copies awaits_copy holds_poison | d2h-not-ordered-after-writer
load back without a fence into slots that a forward writes | computes=1 copies waits unfences computes=0 frees loads_back | h2d-into-slots-in-use
load back without a fence into slots that a forward reads | computes=-1 copies waits unfences reads frees loads_back | h2d-into-slots-in-use
forward into slots that are copied | computes copies forwards | forward-into-slots-in-use
forward that does not wait for its load | computes=1 copies waits loads_back reads | forward-read-before-load
device pages freed before their copy | computes waits copies frees waits holds_poison | device-free-while-copied
device pages freed before their load | computes copies waits loads_back frees | device-free-while-loaded
""".splitlines():  # noqa: E501
    _name, _steps, _violations = _line.split(" | ")
    FAULTS[_name] = _steps, set(_violations.split())


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
        self.slots: Any = None  # of pages on the device
        self.host_slots: Any = None
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

    # ---- Steps ----

    def run(self, steps: str) -> None:
        for step in steps.split():
            name, _, number = step.partition("=")
            getattr(self, name)(*map(int, filter(None, [number])))

    def computes(self, num_pages: int = 2) -> None:
        """A forward writes pages; for 0 all that are free, or all but so many."""
        if num_pages <= 0:
            num_pages += self.allocator.available_size() // PAGE
        self.slots = self.allocator.alloc(num_pages * PAGE)
        self.forward(self.slots)

    def misaligns(self) -> None:
        self.slots = self.slots[PAGE // 2 : -PAGE // 2]

    def forwards(self) -> None:
        self.forward(self.slots)

    def reads(self) -> None:
        """A forward reads the slots, and does not wait for their load."""
        self.forward(self.allocator.alloc(PAGE), self.slots)

    def frees(self) -> None:
        self.allocator.free(self.slots)

    def copies(self) -> None:
        self.host_slots = self.controller.write(self.slots)

    def copies_again(self) -> None:
        from sglang.srt.managers.cache_controller import CacheOperation

        self.controller.write_queue.append(CacheOperation(self.host_slots, self.slots, -1))
        self.controller.start_writing()

    def unfences(self) -> None:
        self.controller.load_fence_stream = self.controller.write_fence_stream = None

    def waits(self) -> None:
        self.bed.device.synchronize()

    def awaits_copy(self) -> None:
        self.controller.ack_write_queue[-1].finish_event.synchronize()

    def loads_back(self) -> None:
        self.slots = self.controller.load(self.host_slots)
        self.consumer = self.controller.start_loading()

    def stores(self) -> None:
        self.stored = store_pages(self.storage, self.keys, self.host_slots)

    def loads(self) -> None:
        assert load_pages(self.storage, self.keys, self.host_slots) == [True, True]

    def writes_meanwhile(self) -> None:
        """Somebody writes to what is stored next."""
        finish = self.storage.end_store
        self.storage.end_store = lambda begun: (self.writes_host(), finish(begun))[1]

    def frees_host(self) -> None:
        self.host.free(self.host_slots)

    def flushes(self) -> None:
        self.host.clear()

    def fills_host(self) -> None:
        self.host.alloc(self.host.available_size())

    @property
    def page(self) -> int:
        return int(self.host_slots[0]) // PAGE

    def writes_host(self) -> None:
        """Somebody's late write."""
        self.pages.views(self.page)[0][77] += 1

    def spoils(self) -> None:
        self.pages.views(self.page)[1][DIM * 8 : DIM * 9] = 0x4240C240

    def holds_poison(self) -> None:
        """The forward is under way, or the pages were free by then."""
        assert self.pages.holds_poison(self.page)

    def all_in_order(self) -> None:
        import torch

        self.run("computes waits")
        before = self.pool.k_buffer[3][self.slots].clone()
        self.run("copies waits stores frees frees_host")
        assert self.stored == [True, True]
        self.host_slots = self.host.alloc(2 * PAGE)
        self.run("loads loads_back")
        assert not torch.equal(self.pool.k_buffer[3][self.slots], before), "it was not awaited"
        self.forward(new := self.allocator.alloc(PAGE), self.slots, self.consumer)
        assert torch.equal(self.seen[3], before)
        self.run("waits frees_host frees")
        self.allocator.free(new)


FAULTS["nothing"] = "all_in_order", set()


def main(names: Iterable[str]) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from seams import BED

    found = {}
    for name in names:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # may be written
            try:
                World(folder).run(FAULTS[name][0])
                BED.device.synchronize()
            except Exception:
                BED.report.violation(traceback.format_exc())
            found[name] = sorted(set(BED.report.take()))
    print(json.dumps({"found": found, "ran": dict(BED.report.runs)}), flush=True)
    os._exit(0)  # what was broken on purpose is not taken down in order


if __name__ == "__main__":
    main(sys.argv[1:] or FAULTS)
