"""One of two ranks of a server, whose tiers are attached when one rank cannot open its own.

The cache of ``small_cache``, in a process of its own; its last line is JSON. Arguments: the rank,
and a folder that both have.
"""

from __future__ import annotations

import json
import os
import sys
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

TIMEOUT = timedelta(seconds=60)


def step_together(cache: Any, until: Callable[[], bool]) -> None:
    """Steps of both ranks until something is so on both."""
    from sglang_tiered.integration.conversations import least_on_every_rank

    step(cache, lambda: least_on_every_rank(cache, [int(until())]) == [1])


def run(rank: int, folder: Path) -> dict[str, Any]:
    import torch.distributed as dist
    from sglang.srt.runtime_context import get_parallel

    held = ExitStack()
    meeting = dist.FileStore(str(folder / "meeting"), 2)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=2, timeout=TIMEOUT)
    world = SimpleNamespace(cpu_group=dist.group.WORLD, world_size=2)
    held.enter_context(get_parallel().override(world_group=world))
    cache = make_cache(str(folder / "kv"), held, rank=rank, group=dist.group.WORLD)
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
    return {
        "refused": refused,
        "held while refused": holding,
        "write policy": write_policies,
        "attached": attached,
    }


def main(rank: int, folder: Path) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    print(json.dumps(run(rank, folder)), flush=True)
    os._exit(0)  # threads of storage would wait for each other


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
