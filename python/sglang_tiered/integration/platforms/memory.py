"""One budget for device and host memory on a machine whose device is its CPU.

SGLang sizes the device pool by a fraction that suits a GPU's own memory, and then the host tier by
what is left of the machine's. On a CPU both come out of the same memory, and the first leaves the
second none. Here the device pool takes a share of the allocatable memory once the weights are
loaded. SGLang then sizes the host tier at twice the device pool, or at what its own check of the
remaining memory allows (``mem_cache.hicache_auto_size``). Allocatable is what the machine and the
memory control group of this process leave, less the reserve.

Nothing here reserves memory: any process may still take it afterwards.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import GiB, MiB, format_bytes
from sglang_tiered.integration.cache.host_size import MIN_TOKENS, least_of_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.config import TieredConfig

logger = logging.getLogger(__name__)


HOST_MEMORY_RESERVE_BYTES = GiB
"""Memory kept free on a CPU. SGLang's 10 GiB suit a GPU server: a laptop has less in all."""

# With a host tier of twice the device pool, two fifths are left for activations, the page cache
# that loads go through, and other programs.
DEVICE_SHARE = 1 / 5
# The pool is zeroed at start, at about half a gigabyte a second on a small machine.
MAX_DEVICE_BYTES = 8 * GiB

# A scheduler and a detokenizer, which have not started when the launcher checks: resident memory
# after the start of the demo model, rounded up.
PROCESSES_BYTES = 1536 * MiB


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """The smallest memory of a server, in bytes."""

    weights: int
    token: int  # KV of one token, all layers and ranks
    host: int = 0  # the host tier that the user asks for

    @property
    def num_bytes(self) -> int:
        smallest = MIN_TOKENS * self.token
        pools = smallest + max(smallest, self.host)
        return self.weights + pools + PROCESSES_BYTES + HOST_MEMORY_RESERVE_BYTES


def device_pool_bytes(
    allocatable: int, *, num_ranks: int, host_bytes: int | None, has_token_limit: bool
) -> int:
    """Return what one rank's device pool may take of the memory that all ranks can allocate.

    ``host_bytes``: the host tier of all ranks where the user sized it; it is set aside first. With
    a limit in tokens (``--max-total-tokens``) the user sized the device pool too, and the share
    only leaves room for a host tier.
    """
    rest = allocatable - (host_bytes or 0)
    if has_token_limit:
        total = rest if host_bytes is not None else rest * 3 // 4
    else:
        share = rest // 2 if host_bytes is not None else rest
        total = min(MAX_DEVICE_BYTES, int(allocatable * DEVICE_SHARE), share)
    return max(0, total // num_ranks)


def allocatable_bytes() -> int:
    """Return what all ranks of this machine can allocate: free or reclaimable memory within the
    control group, less the reserve that SGLang keeps. Never negative."""
    from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
    from sglang.srt.mem_cache.pool_host import base

    try:
        available: int = available_host_memory_bytes(allow_cgroup_fallback=True)
    except ValueError:  # SGLang cannot find the control group
        available = psutil.virtual_memory().available
    reserve: int = base.HICACHE_HOST_MEMORY_RESERVE_BYTES
    return max(0, available - reserve)


def check_memory(needed: WorkingSet, allocatable: int) -> None:
    """Raise ``ConfigError``, before a model is loaded, if it cannot start in this memory."""
    there = allocatable + HOST_MEMORY_RESERVE_BYTES
    if needed.num_bytes > there:
        raise ConfigError(
            f"this model needs at least {format_bytes(needed.num_bytes)} of memory "
            f"({format_bytes(needed.weights)} of it weights), but {format_bytes(there)} can be had "
            "here; free some, raise the memory limit of this process, lower --tier-host-bytes, or "
            "pass another --model-path."
        )


def working_set(server_args: Any, host_bytes: int | None) -> WorkingSet:
    """Return the smallest memory of the model in SGLang's resolved arguments. Unknown parts, such
    as weights that are not on this machine yet, count as 0. ``host_bytes``: the user's."""
    from sglang.srt.arg_groups.overrides import model_config_of

    from sglang_tiered.integration.identity.model import find_weight_files, one_copy

    files = find_weight_files(
        server_args.model_path, server_args.revision, server_args.download_dir
    )
    model = model_config_of(server_args)
    return WorkingSet(
        weights=int(sum(file.stat().st_size for file in one_copy(files)) * _widening(model)),
        token=token_bytes(model, server_args.kv_cache_dtype),
        host=host_bytes or 0,
    )


def _widening(model: Any) -> float:
    """Return how many bytes of memory a byte of the checkpoint takes: SGLang halves float32 by
    default. 1 where the checkpoint is quantised or does not name its format."""
    import torch

    stored = getattr(model.hf_config, "dtype", None)
    stored = getattr(torch, stored, None) if isinstance(stored, str) else stored
    is_quantized = getattr(model.hf_config, "quantization_config", None) is not None
    if is_quantized or not isinstance(stored, torch.dtype):
        return 1.0
    return float(model.dtype.itemsize / stored.itemsize)


def token_bytes(model: Any, kv_cache_dtype: str) -> int:
    """Return the KV bytes of one token over all layers and ranks. model: SGLang's ``ModelConfig``.
    Windows and states that cost less per token count in full."""
    latent: int | None = getattr(model, "kv_lora_rank", None)
    if latent:
        elements = latent + model.qk_rope_head_dim
    else:
        elements = model.get_total_num_kv_heads() * (model.head_dim + model.v_head_dim)
    itemsize = 1 if "fp8" in kv_cache_dtype else model.dtype.itemsize
    return int(model.num_hidden_layers * elements * itemsize)


def around_profile(
    original: Callable[..., int], configurator: Any, config: TieredConfig | None
) -> int:
    """Return the bytes of this rank's device pool
    (``KVCacheConfigurator._profile_available_bytes``).

    SGLang's function subtracts a model's other needs and divides the rest among a hybrid model's
    pools. Given 0 free bytes before the load, it withholds no fraction. Raises ``ConfigError``, on
    all ranks alike, where the rest is too small.
    """
    from sglang.srt.mem_cache import kv_cache_configurator as module
    from sglang.srt.mem_cache.pool_host.base import ranks_per_host
    from sglang.srt.runtime_context import get_schedule

    gc.collect()
    allocatable = least_of_ranks(allocatable_bytes())
    num_ranks = ranks_per_host()
    budget = device_pool_bytes(
        allocatable,
        num_ranks=num_ranks,
        host_bytes=None if config is None else config.host_bytes,
        has_token_limit=get_schedule().max_total_tokens is not None,
    )
    logger.info(
        "Device pool: at most %s a rank, of %s that can be allocated.",
        format_bytes(budget),
        format_bytes(allocatable),
    )
    measured = module.get_available_gpu_memory
    module.get_available_gpu_memory = lambda *_, **__: budget / GiB
    try:
        left = original(configurator, 0)
    except (ValueError, ZeroDivisionError):  # its advice is about a fraction of GPU memory
        left = 0
    finally:
        module.get_available_gpu_memory = measured
    model, kv_dtype = configurator.model_config, configurator.kv_cache_dtype_str or "auto"
    smallest = MIN_TOKENS * token_bytes(model, kv_dtype) // num_ranks
    if left < smallest:
        raise ConfigError(
            f"the device pool needs at least {format_bytes(smallest)} a rank for "
            f"{MIN_TOKENS:,} tokens, and of {format_bytes(allocatable)} that can be allocated "
            f"beside the weights {format_bytes(max(0, left))} are left for it; lower "
            "--tier-host-bytes, or raise the memory limit of this process."
        )
    return left
