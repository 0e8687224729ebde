"""The ranks of a server, whose tiers are attached when one rank cannot open its own, and of which
one declines a load for some steps.

Two hold parts of the same pages and two of others, as with DP attention: the first two by tensor
parallelism of attention, the others by context parallelism, which SGLang's group of the ranks of
tensor parallelism leaves out. Each is the cache of ``small_cache`` in a process of its own, in a
folder that is the argument; the last line is JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from array import array
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from small_cache import TOKENS, attach, broken_shard, compute, flush, keys_of, make_cache, step

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_RANKS = 4
TIMEOUT = timedelta(seconds=60)
NUM_DECLINED_STEPS = 40


def step_together(cache: Any, until: Callable[[], bool]) -> None:
    from sglang_tiered.integration.ranks import least_on_every_rank

    step(cache, lambda: least_on_every_rank(cache, [int(until())]) == [1])


def steps_until_load(cache: Any, *, declines: bool) -> int:
    """Steps of two ranks until the load of a prompt begins, which is asked for now and then.
    ``declines``: this rank says for some of them that computing is sooner."""
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from sglang_tiered.policy.cost_model import PrefillCost

    costs, request = cache.tiering.planner.costs, CacheRequestHandle("r", 0)
    costs.prefill = PrefillCost((1.0, 1.0, 0.0))
    load_seconds = costs.load_seconds
    pending = cache.storage_prefetch_retries._pending
    for number in range(100 * NUM_DECLINED_STEPS):
        is_declined = declines and number < NUM_DECLINED_STEPS
        costs.load_seconds = (lambda *_: 1e9) if is_declined else load_seconds
        if request.rid in pending or number % (NUM_DECLINED_STEPS + 5) == 0:
            cache.storage_prefetch_retries.cancel(request.rid)
            node = cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", TOKENS))))
            cache.prefetch_from_storage(
                request, node.last_host_node, array("q", TOKENS), matched_prefix_tokens=[]
            )
        if request in cache.ongoing_prefetch:
            step_together(cache, lambda: request not in cache.ongoing_prefetch)
            return number
        cache.check_hicache_events()
        cache.load_has_ended(request)
    raise AssertionError("the load never begins")


def run(rank: int, folder: Path) -> dict[str, Any]:
    import torch.distributed as dist
    from sglang.srt.runtime_context import get_parallel

    held = ExitStack()
    meeting = dist.FileStore(str(folder / "meeting"), NUM_RANKS)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=NUM_RANKS, timeout=TIMEOUT)
    world = SimpleNamespace(cpu_group=dist.group.WORLD, world_size=NUM_RANKS)
    held.enter_context(get_parallel().override(world_group=world))
    pairs = [dist.new_group([first, first + 1]) for first in range(0, NUM_RANKS, 2)]
    alone = [dist.new_group([each]) for each in range(NUM_RANKS)][rank]
    tp, cp = (pairs[0], alone) if rank < 2 else (alone, pairs[1])
    groups = {"tp_cache_group": tp, "attn_tp_cache_group": tp, "attn_cp_cache_group": cp}
    cache = make_cache(str(folder / "kv"), held, rank=rank, **groups)
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
    said: dict[str, Any] = {"refused": refused, "held while refused": holding}
    said |= {"write policy": write_policies, "attached": attach(cache)}
    compute(cache, TOKENS)
    step_together(cache, lambda: cache.storage.num_kept(keys_of(TOKENS)) == 4)
    flush(cache)
    said["steps until its load"] = steps_until_load(cache, declines=rank % 2 == 1)
    if rank % 2:
        assert cache.detach_storage_backend()[0]
    return said | {"differing": attach(cache)}


def main(folder: Path) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang_tiered.integration.cache.radix_cache  # noqa: F401 (once, for all ranks)

    given = [(rank, folder) for rank in range(NUM_RANKS)]
    with multiprocessing.get_context("fork").Pool(NUM_RANKS) as pool:
        answers = pool.starmap(run, given, chunksize=1)
        print(json.dumps({"ranks": answers}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
