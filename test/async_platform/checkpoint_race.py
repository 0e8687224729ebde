"""A checkpoint of a node whose copy to host memory is queued: what does NVMe hold then?

The cache of ``small_cache``, in a process of its own; its last line is JSON. The argument says what
happens to the node meanwhile: ``nothing``, or ``split``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import ExitStack
from typing import Any

from page_calls import load_pages
from small_cache import PAGE, TOKENS, compute, keys_of, make_cache, step

STEPS = 50
"""Far more than a node needs from its offer to its store."""


def stored(cache: Any, slots: Any) -> list[bool]:
    """For each page of the prompt, whether NVMe serves the bytes that were computed."""
    import torch

    host, pool = (
        cache.cache_controller.mem_pool_host.anchor_entry.host_pool,
        cache.token_to_kv_pool_allocator.get_kvcache(),
    )
    hashes = keys_of(TOKENS)
    pages = host.alloc(len(hashes) * PAGE)
    right = []
    for number, is_there in enumerate(load_pages(cache.storage, hashes, pages)):
        rows = slots[number * PAGE : (number + 1) * PAGE]
        computed = [
            [layer[rows].flatten() for layer in half] for half in (pool.k_buffer, pool.v_buffer)
        ]
        page = int(pages[number * PAGE]) // PAGE
        held = [[layer.flatten() for layer in half[page]] for half in host.kv_buffer]
        pairs = zip(sum(computed, []), sum(held, []), strict=True)
        right.append(is_there and all(torch.equal(*pair) for pair in pairs))
    return right


def race(folder: str, meanwhile: str) -> dict[str, Any]:
    from seams import BED

    from sglang_tiered.integration.admin.calls import Calls
    from sglang_tiered.integration.admin.conversations import checkpoint

    cache = make_cache(folder, ExitStack())
    calls = Calls({"checkpoint": checkpoint})

    def ask() -> dict[str, Any]:
        """``/tier/checkpoint``, as the scheduler hears it."""
        body = {"input_ids": TOKENS, "tier": "nvme"}
        answer: dict[str, Any] = calls.answer(cache, "checkpoint", "1", body)
        return answer

    slots = compute(cache, TOKENS)
    if meanwhile == "split":
        compute(cache, [*TOKENS[: 2 * PAGE], *range(9000, 9000 + PAGE)])
    ask()
    step(cache, lambda: bool(cache.ongoing_backup), STEPS)
    step(cache, lambda: not cache.ongoing_backup)
    before = BED.report.take()
    BED.device.synchronize()
    step(cache, lambda: bool(ask()["done"]))
    step(cache, lambda: not cache.ongoing_backup)
    after = BED.report.take()
    return {"before": before, "after": after, "answer": ask(), "stored": stored(cache, slots)}


def main(meanwhile: str) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(race(folder, meanwhile)), flush=True)
        os._exit(0)  # a checkpoint's threads may wait for what never comes


if __name__ == "__main__":
    main(sys.argv[1])
