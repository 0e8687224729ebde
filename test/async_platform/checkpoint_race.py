"""A checkpoint of a node whose copy to host memory is queued: what does NVMe hold then?

The cache of ``small_cache``, in a process of its own; its last line is JSON. The argument says what
happens to the node meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import ExitStack
from typing import Any

from page_calls import load_pages
from small_cache import PAGE, compute, keys_of, make_cache, step

STEPS = 50
"""Far more than a node needs from its offer to its store."""


class Race:
    """One cache, and the conversation that is to be durable."""

    def __init__(self, folder: str) -> None:
        from sglang_tiered.integration.admin.calls import Calls
        from sglang_tiered.integration.admin.conversations import Checkpoints

        self._held = ExitStack()
        self.cache = make_cache(folder, self._held)
        self.tokens = list(range(100, 100 + 4 * PAGE))
        self.pool = self.cache.token_to_kv_pool_allocator.get_kvcache()
        self._calls = Calls({"checkpoint": Checkpoints().begin})

    def ask(self) -> dict[str, Any]:
        """``/tier/checkpoint``, as the scheduler hears it."""
        body = {"input_ids": self.tokens, "tier": "nvme"}
        answer: dict[str, Any] = self._calls.answer(self.cache, "checkpoint", "1", body)
        return answer

    def stored(self) -> list[bool]:
        """For each page of the conversation, whether NVMe serves the bytes that were computed."""
        hashes = keys_of(self.tokens)
        host = self.cache.cache_controller.mem_pool_host.anchor_entry.host_pool
        pages = host.alloc(len(hashes) * PAGE)
        loaded = load_pages(self.cache.storage, hashes, pages)
        right = []
        for number, is_there in enumerate(loaded):
            page = int(pages[number * PAGE]) // PAGE
            rows = self.slots[number * PAGE : (number + 1) * PAGE]
            halves = zip((self.pool.k_buffer, self.pool.v_buffer), host.kv_buffer, strict=True)
            right.append(
                is_there
                and all(
                    bool((half[page, layer].view(PAGE, -1) == rows_of.view(PAGE, -1)).all())
                    for layers, half in halves
                    for layer, rows_of in enumerate(buffer[rows] for buffer in layers)
                )
            )
        return right

    def run(self, meanwhile: str) -> dict[str, Any]:
        from seams import BED

        self.slots = compute(self.cache, self.tokens)
        if meanwhile == "it is split":
            compute(self.cache, [*self.tokens[: 2 * PAGE], *range(9000, 9000 + PAGE)])
        self.ask()
        step(self.cache, lambda: bool(self.cache.ongoing_backup), STEPS)
        step(self.cache, lambda: not self.cache.ongoing_backup)
        before = BED.report.take()
        if meanwhile == "it is asked for again":
            self.ask()
            step(self.cache, lambda: bool(self.cache.ongoing_backup), STEPS)
        BED.device.synchronize()
        step(self.cache, lambda: bool(self.ask()["done"]))
        step(self.cache, lambda: not self.cache.ongoing_backup)
        return {
            "before": before,
            "after": BED.report.take(),
            "answer": self.ask(),
            "stored": self.stored(),
        }


def main(meanwhile: str) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(Race(folder).run(meanwhile)), flush=True)
        os._exit(0)  # a checkpoint's threads may wait for what never comes


if __name__ == "__main__":
    main(sys.argv[1])
