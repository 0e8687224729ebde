"""A checkpoint of a node whose copy to host memory is queued: what does NVMe hold then?

The real ``TieredRadixCache`` over the real ``TieredStorage`` and region store, without a model. A
process of its own; its last line is JSON. The argument says what happens to the node meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from array import array
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

PAGE, LAYERS, HEADS, DIM, PAGES = 16, 4, 2, 64, 16
DEADLINE_S = 60.0
STEPS = 50
"""Far more than a node needs from its offer to its store."""


def make_cache(folder: str, held: ExitStack) -> Any:
    import torch
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    from sglang_tiered.config import MiB, NvmeConfig, TieredConfig, TierMode
    from sglang_tiered.integration import namespace
    from sglang_tiered.integration.radix_cache import TieredRadixCache
    from sglang_tiered.integration.server_args import _storage_arguments

    nvme = NvmeConfig(directory=folder, capacity_bytes=256 * MiB, region_bytes=4 * MiB)
    TieredConfig(mode=TierMode.NVME, host_bytes=8 * MiB, nvme=nvme).to_environment(os.environ)
    namespace.server_identity = lambda config: {"model": "m"}
    flags = {
        flag.removeprefix("--").replace("-", "_"): value
        for flag, value in _storage_arguments(PAGE).items()
        if flag.startswith("--hicache-storage-backend")
    }
    arguments = ServerArgs(
        model_path="dummy",
        page_size=PAGE,
        hicache_io_backend="direct",
        hicache_mem_layout="page_first_direct",
        hicache_write_policy="write_through",
        **flags,
    )
    set_global_server_args_for_scheduler(arguments)
    held.enter_context(get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1))
    pool = MHATokenToKVPool(
        size=PAGE * PAGES,
        page_size=PAGE,
        dtype=torch.float32,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    params = CacheInitParams(
        req_to_token_pool=ReqToTokenPool(
            size=4, max_context_len=512, device="cpu", enable_memory_saver=False
        ),
        token_to_kv_pool_allocator=PagedTokenToKVPoolAllocator(
            PAGE * PAGES, PAGE, torch.float32, "cpu", pool, False
        ),
        page_size=PAGE,
        disable=False,
        tree_components=(ComponentType.FULL,),
    )
    cache = TieredRadixCache(params=params)
    cache.init_hicache(arguments, params)
    return cache


class Race:
    """One cache, and the conversation that is to be durable."""

    def __init__(self, folder: str) -> None:
        from sglang_tiered.integration import conversations

        self._held = ExitStack()
        self.cache = make_cache(folder, self._held)
        self.tokens = list(range(100, 100 + 4 * PAGE))
        self.pool = self.cache.token_to_kv_pool_allocator.get_kvcache()
        self._checkpoint = conversations.checkpoint

    def compute(self, tokens: list[int]) -> torch.Tensor:
        """Put a prompt into the tree, as a request does that has finished. Its copy is queued."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        slots: torch.Tensor = self.cache.token_to_kv_pool_allocator.alloc(len(tokens))
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer[slots] = torch.randn(len(slots), HEADS, DIM)
        key = RadixKey(array("q", tokens))
        self.cache.insert(InsertParams(key=key, value=slots))
        self.cache.flush_pending_backups()
        assert self.cache.ongoing_write_through
        return slots

    def ask(self) -> dict[str, Any]:
        """``/tier/checkpoint``, as the scheduler hears it."""
        body = {"input_ids": self.tokens, "tier": "nvme"}
        answer: dict[str, Any] = self._checkpoint(self.cache, "1", body)
        return answer

    def step(self, until: Callable[[], bool], steps: int | None = None) -> None:
        """Steps of the scheduler until something is so, with a deadline or a number."""
        deadline = time.monotonic() + DEADLINE_S
        while not until() and steps != 0:
            assert time.monotonic() < deadline
            self.cache.check_hicache_events()
            steps = None if steps is None else steps - 1
            time.sleep(0.001)

    def stored(self) -> list[bool]:
        """For each page of the conversation, whether NVMe serves the bytes that were computed."""
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        hashes = get_storage_hash_str(RadixKey(array("q", self.tokens)), None, page_size=PAGE)
        host = self.cache.cache_controller.mem_pool_host.anchor_entry.host_pool
        pages = host.alloc(len(hashes) * PAGE)
        loaded = self.cache.storage.batch_get_v1(hashes, pages)
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

        self.slots = self.compute(self.tokens)
        if meanwhile == "it is split":
            self.compute([*self.tokens[: 2 * PAGE], *range(9000, 9000 + PAGE)])
        self.ask()
        self.step(lambda: bool(self.cache.ongoing_backup), STEPS)
        self.step(lambda: not self.cache.ongoing_backup)
        before = BED.report.take()
        if meanwhile == "it is asked for again":
            self.ask()
            self.step(lambda: bool(self.cache.ongoing_backup), STEPS)
        BED.device.synchronize()
        self.step(lambda: bool(self.ask()["done"]))
        self.step(lambda: not self.cache.ongoing_backup)
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
