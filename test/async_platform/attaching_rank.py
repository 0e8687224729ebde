"""The ranks of a server, whose tiers are attached when one rank cannot open its own.

Two hold parts of the same pages and two of others, as with DP attention. Each is the cache of
``small_cache`` in a process of its own, in a folder that is the argument; the last line is JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from small_cache import (
    TOKENS,
    attach,
    broken_shard,
    compute,
    flush,
    keys_of,
    make_cache,
    step,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_RANKS = 4
TIMEOUT = timedelta(seconds=60)


def step_together(cache: Any, until: Callable[[], bool]) -> None:
    """Steps of two ranks until something is so on both."""
    from sglang_tiered.integration.cache.rank_consensus import least_on_every_rank

    step(cache, lambda: least_on_every_rank(cache, [int(until())]) == [1])


def run(rank: int, folder: Path) -> dict[str, Any]:
    import torch.distributed as dist
    from sglang.srt.runtime_context import get_parallel

    held = ExitStack()
    meeting = dist.FileStore(str(folder / "meeting"), NUM_RANKS)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=NUM_RANKS, timeout=TIMEOUT)
    world = SimpleNamespace(cpu_group=dist.group.WORLD, world_size=NUM_RANKS)
    held.enter_context(get_parallel().override(world_group=world))
    pairs = [dist.new_group([first, first + 1]) for first in range(0, NUM_RANKS, 2)]
    cache = make_cache(str(folder / "kv"), held, rank=rank, group=pairs[rank // 2])
    assert cache.detach_storage_backend()[0]
    refused, holding, write_policies = [], [], []
    for broken in (0, 1):
        with broken_shard(folder / "kv", rank=rank) if broken == rank else nullcontext():
            refused.append(attach(cache, hicache_write_policy="write_through_selective"))
        holding.append(cache.storage is not None)
        write_policies.append(cache.cache_controller.write_policy)
        compute(cache, TOKENS)
        step_together(cache, lambda: not cache.ongoing_write_through)
        flush(cache)
    attached = attach(cache)
    compute(cache, TOKENS)
    step_together(cache, lambda: cache.storage.num_kept(keys_of(TOKENS)) == 4)
    if rank % 2:
        assert cache.detach_storage_backend()[0]
    differing = attach(cache)
    return {
        "refused": refused,
        "held while refused": holding,
        "write policy": write_policies,
        "attached": attached,
        "differing": differing,
    }


def main(folder: Path) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang_tiered.integration.cache.radix_cache  # noqa: F401 (once, for all ranks)

    fork = multiprocessing.get_context("fork")
    said = fork.SimpleQueue()

    def be_rank(rank: int) -> None:
        code = 1
        try:
            said.put((rank, run(rank, folder)))
            code = 0
        except Exception:
            traceback.print_exc()
        os._exit(code)  # threads of storage would wait for each other

    ranks = [fork.Process(target=be_rank, args=(rank,)) for rank in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * NUM_RANKS
    print(json.dumps([answer for _, answer in sorted(said.get() for _ in ranks)]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
