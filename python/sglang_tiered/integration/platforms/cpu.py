"""The reference CPU platform: SGLang and its host tier without CUDA or ``sgl_kernel``.

Active only where CUDA is absent (``plugin.activate_platform``). SGLang's own CPU engine
(``SGLANG_USE_CPU_ENGINE``) needs the compiled ``sgl_kernel`` and stays off; this platform runs the
"native" PyTorch forwards of every layer and the ``reference`` attention backend.

``patch_host_pools`` changes SGLang in four places, because 0.5.23 builds its host pools for a GPU:

1. ``pool_host.common.ALLOC_MEMORY_FUNCS["cpu"]``: host memory is not registered with CUDA.
2. ``HostKVCache.__init__``: ``pin_memory`` is always false.
3. ``transfer_kv_*direct*`` in four modules of ``pool_host``: our own (``host_copies``), since the
   names are imported from ``sgl_kernel`` only under CUDA.
4. ``HICACHE_HOST_MEMORY_RESERVE_BYTES``: 10 GiB kept free is a GPU server's figure; a laptop or CI
   machine has less in all.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.platforms import host_copies
from sglang_tiered.integration.platforms.memory import HOST_MEMORY_RESERVE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable


THREADS_BIND = "SGLANG_CPU_OMP_THREADS_BIND"


class ReferenceCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """An out-of-tree platform whose device is the CPU."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        # SGLang splits the name of the default device; every rank shares the one CPU.
        return "cpu"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def apply_server_args_defaults(self, server_args: Any) -> None:
        if server_args.speculative_algorithm is not None:
            # SGLang checks this for some algorithms; the others would fail at the first request.
            raise ConfigError(
                f"--speculative-algorithm {server_args.speculative_algorithm} needs a GPU, since "
                "SGLang has no kernels for its draft trees without one; drop it."
            )
        if server_args.lora_paths or server_args.enable_lora:
            raise ConfigError(
                "--enable-lora and --lora-paths need a GPU, since SGLang's adapter layers pin "
                "memory; drop them."
            )
        if server_args.attn_dp_size > 1:  # --enable-dp-attention means the same by now
            raise ConfigError(
                f"--attn-dp-size {server_args.attn_dp_size} needs a GPU, since SGLang's DP "
                "attention pins memory; drop it."
            )
        # An idle scheduler polls without pause, which on a GPU server costs one core of many and
        # on a small machine half of the compute.
        server_args.sleep_on_idle = True
        # For the device "cpu" SGLang fills in ``intel_amx``, which needs sgl_kernel, before it asks
        # the platform for its default.
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = self.get_default_attention_backend()
        check_backends(server_args, ("reference", "pod", "torch_native", "flex_attention"))
        copy_directly(server_args)
        num_ranks = server_args.tp_size * server_args.pp_size * server_args.dp_size
        if num_ranks > 1:
            os.environ.setdefault(THREADS_BIND, cores_per_rank(num_ranks, os.sched_getaffinity(0)))

    def get_default_attention_backend(self) -> str:
        return "reference"


def check_backends(server_args: Any, attention: tuple[str, ...]) -> None:
    """Raises ``ConfigError`` for a backend that SGLang would find missing once weights are loaded.
    ``attention``: those that run here."""
    known = {f"{phase}attention_backend": attention for phase in ("", "prefill_", "decode_")}
    for name, names in (*known.items(), ("sampling_backend", ("pytorch",))):
        if (chosen := getattr(server_args, name)) not in (None, *names):
            raise ConfigError(
                f"--{name.replace('_', '-')} {chosen} needs compiled kernels, which are not used "
                f"here; pass {' or '.join(names)}."
            )


def copy_directly(server_args: Any) -> None:
    """Have SGLang copy pages without sgl_kernel, whose absence ends the scheduler. Raises
    ``ConfigError`` for a layout that only its copies know."""
    if not server_args.enable_hierarchical_cache:
        return
    if (layout := server_args.hicache_mem_layout) in ("page_head", "page_first_kv_split"):
        raise ConfigError(
            f"--hicache-mem-layout {layout} needs sgl_kernel, which is not used here; drop it."
        )
    if server_args.hicache_io_backend == "kernel":
        server_args.hicache_io_backend = "direct"  # SGLang then picks the layout that fits


def cores_per_rank(num_ranks: int, cores: set[int]) -> str:
    """Deal the cores out in turn, in the form of ``SGLANG_CPU_OMP_THREADS_BIND``: ``0,2|1,3``.

    SGLang assigns by NUMA node and refuses more ranks than nodes. With fewer cores than ranks some
    ranks share a core.
    """
    ordered = sorted(cores)
    dealt = [
        ordered[rank::num_ranks] or [ordered[rank % len(ordered)]] for rank in range(num_ranks)
    ]
    return "|".join(",".join(map(str, own)) for own in dealt)


def patch_host_pools() -> None:
    """Apply the four patches. Idempotent; only schedulers need it, every process may do it."""
    from sglang.srt.mem_cache.pool_host import base, common, dsa, mamba, mha, mla

    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate_unregistered
    for module in (mha, mla, mamba, dsa):
        for function in host_copies.FUNCTIONS:
            setattr(module, function.__name__, function)
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = HOST_MEMORY_RESERVE_BYTES
    _never_pin(base.HostKVCache)


def _allocate_unregistered(
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    buffer: torch.Tensor = allocator.allocate(dims, dtype=dtype, device=device)
    return buffer


def _never_pin(host_pool_class: Any) -> None:
    original = host_pool_class.__init__
    if hasattr(original, "__wrapped__"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def without_pinning(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["pin_memory"] = False
        original(*bound.args, **bound.kwargs)

    host_pool_class.__init__ = without_pinning


def around_dtype(original: Callable[..., torch.dtype], config: Any, dtype: Any) -> torch.dtype:
    """Return what SGLang chooses for a checkpoint's configuration, but bfloat16 where it makes
    float16 of float32 by itself.

    SGLang makes float16 of a float32 checkpoint, since GPUs compute fast in it. CPUs do not, or
    have no instructions for it. A product of 512 rows ran at 8 to 9 billion operations a second in
    float16, 30 in float32 and 90 to 105 in bfloat16. (Two-core AMD EPYC VM with AVX-512 BF16, busy,
    2026-11-26.) With the instructions of older processors bfloat16 was no slower than float16. It
    takes as little memory. A checkpoint in float16, or ``--dtype``, stays what it is.
    """
    chosen = original(config, dtype)
    if chosen is torch.float16 and str(dtype).lower() == "auto" and not _holds_float16(config):
        return torch.bfloat16
    return chosen


def _holds_float16(config: Any) -> bool:
    values = config if isinstance(config, dict) else vars(config)
    found = values.get("dtype") or values.get("torch_dtype")
    return str(found).rpartition(".")[2] in ("float16", "half")
