"""One budget for device and host memory on a machine whose device is its CPU.

SGLang sizes the device pool by a fraction that suits a GPU's own memory, and then the host tier by
what is left of the machine's: on a CPU both come out of the same memory, and the first leaves the
second none. Here the device pool takes a share of what can be allocated once the weights are
loaded; SGLang then sizes the host tier at twice the device pool, or at what its own check of the
remaining memory allows (``mem_cache.hicache_auto_size``). What can be allocated is what the machine
and the memory control group of this process leave, less the reserve.

Nothing here reserves memory: a process that takes it afterwards takes it from everybody.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_tiered.config import GiB, MiB, TieredConfig, format_bytes
from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.host_size import MIN_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = [
    "HOST_MEMORY_RESERVE_BYTES",
    "WorkingSet",
    "allocatable_bytes",
    "around_profile",
    "check_memory",
    "device_pool_bytes",
    "token_bytes",
    "working_set",
]

HOST_MEMORY_RESERVE_BYTES = GiB
"""What is left alone on a CPU. SGLang's 10 GiB suit a GPU server: a laptop has less in all."""

# With a host tier of twice the device pool, two fifths are left for activations, the page cache
# that loads go through, and other programs.
DEVICE_SHARE = 1 / 5
# The pool is zeroed at start, at about half a gigabyte a second on a small machine.
MAX_DEVICE_BYTES = 8 * GiB

# A scheduler and a detokenizer, which are not yet there when the launcher looks: resident
# memory after the start of the demo model, rounded up.
PROCESSES_BYTES = 1536 * MiB


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """What a server takes at the least, in bytes."""

    weights: int
    token: int  # KV of one token, all layers and ranks

    @property
    def num_bytes(self) -> int:
        pools = 2 * MIN_TOKENS * self.token  # one on the device, one in host memory
        return self.weights + pools + PROCESSES_BYTES + HOST_MEMORY_RESERVE_BYTES


def device_pool_bytes(
    allocatable: int, *, num_ranks: int, host_bytes: int | None, has_token_limit: bool
) -> int:
    """What one rank's device pool may take of what all ranks can allocate.

    ``host_bytes``: the host tier of all ranks where the user sized it; it comes first. With a limit
    in tokens (``--max-total-tokens``) the user sized the device pool too, and the share is only
    what keeps the host tier possible.
    """
    rest = allocatable - (host_bytes or 0)
    if has_token_limit:
        total = rest if host_bytes is not None else rest * 3 // 4
    else:
        share = rest // 2 if host_bytes is not None else rest
        total = min(MAX_DEVICE_BYTES, int(allocatable * DEVICE_SHARE), share)
    return max(0, total // num_ranks)


def allocatable_bytes() -> int:
    """What all ranks of this machine can allocate: free or reclaimable memory within the control
    group, less the reserve that SGLang keeps. Never negative."""
    from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
    from sglang.srt.mem_cache.pool_host import base

    available: int = available_host_memory_bytes(allow_cgroup_fallback=True)
    reserve: int = base.HICACHE_HOST_MEMORY_RESERVE_BYTES
    return max(0, available - reserve)


def check_memory(needed: WorkingSet, allocatable: int) -> None:
    """Refuse, before a model is loaded, what cannot come up in this machine's memory."""
    there = allocatable + HOST_MEMORY_RESERVE_BYTES
    if needed.num_bytes > there:
        raise ConfigError(
            f"this model needs at least {format_bytes(needed.num_bytes)} of memory "
            f"({format_bytes(needed.weights)} of it weights), but {format_bytes(there)} can be had "
            "here; free some, raise the memory limit of this process, or pass another --model-path "
            "or a smaller --dtype."
        )


def working_set(server_args: Any) -> WorkingSet:
    """What the model of SGLang's resolved arguments takes at the least; what cannot be known, such
    as weights that are not on this machine yet, counts as nothing."""
    from sglang.srt.arg_groups.overrides import model_config_of

    from sglang_tiered.integration.model_identity import find_weight_files

    weights = find_weight_files(server_args.model_path, server_args.revision)
    model = model_config_of(server_args)
    return WorkingSet(_weight_bytes(weights), token_bytes(model, server_args.kv_cache_dtype))


def token_bytes(model: Any, kv_cache_dtype: str) -> int:
    """KV of one token over all layers and ranks, of SGLang's ``ModelConfig``. Windows and states
    that cost less per token count in full."""
    latent: int | None = getattr(model, "kv_lora_rank", None)
    if latent:
        elements = latent + model.qk_rope_head_dim
    else:
        elements = model.get_total_num_kv_heads() * (model.head_dim + model.v_head_dim)
    itemsize = 1 if "fp8" in kv_cache_dtype else model.dtype.itemsize
    return int(model.num_hidden_layers * elements * itemsize)


def _weight_bytes(files: list[Path]) -> int:
    """The size of one copy of the weights: checkpoints come with others, in other formats and
    (``consolidated``) in one piece. In memory they may take more, in a wider number format."""
    by_suffix: dict[str, int] = {}
    for file in files:
        if not file.name.startswith("consolidated"):
            by_suffix[file.suffix] = by_suffix.get(file.suffix, 0) + file.stat().st_size
    return by_suffix.get(".safetensors") or max(by_suffix.values(), default=0)


def around_profile(original: Callable[..., int], configurator: Any, _: float) -> int:
    """``KVCacheConfigurator._profile_available_bytes``: the bytes of this rank's device pool.

    SGLang's function subtracts what a model needs beside the pool and divides the rest among a
    hybrid model's pools. Told that 0 bytes were free before the load, it keeps no fraction back.
    """
    from sglang.srt.mem_cache import kv_cache_configurator as module

    measured = module.get_available_gpu_memory
    module.get_available_gpu_memory = _measure
    try:
        return original(configurator, 0)
    finally:
        module.get_available_gpu_memory = measured


def _measure(
    device: str, gpu_id: int, *, distributed: bool = False, cpu_group: Any = None
) -> float:
    """The device pool's budget in GiB, the same on all ranks."""
    import torch
    from sglang.srt.mem_cache.pool_host import base
    from sglang.srt.runtime_context import get_schedule

    gc.collect()
    least = torch.tensor(allocatable_bytes(), dtype=torch.int64)
    if distributed:
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=cpu_group)
    config = TieredConfig.from_environment()
    budget = device_pool_bytes(
        int(least),
        num_ranks=base.ranks_per_host() if config is None else config.num_ranks,
        host_bytes=None if config is None else config.host_bytes,
        has_token_limit=get_schedule().max_total_tokens is not None,
    )
    return budget / GiB
