"""The platform where there is CUDA and no ``sgl_kernel``: another torch than SGLang's own, say.

SGLang 0.5.23 decides by ``is_cuda()`` whether a module imports ``sgl_kernel``, and nearly all of
them would end at their import without it. While this platform serves, ``is_cuda()`` is false, so
every layer takes what SGLang has for other devices: PyTorch and Triton. The device stays ``cuda``.

What is changed, and why:

1. ``torch.version.cuda`` is None from the platform's activation, which SGLang does before it
   defines ``is_cuda``, until ``prepare``: ``is_cuda`` asks once and keeps its answer.
2. ``transfer_kv_*direct*`` in four modules of ``pool_host``: our own (``host_copies``).
3. ``_is_cuda`` and ``CUDA_CAPABILITY`` of SGLang's Triton attention for prefills, which only choose
   tiles by them: without them it would take those of the oldest devices.
4. Norms and rotary embeddings (``cuda_layers``), by SGLang's registry for platforms: in plain
   PyTorch they were most of a forward's launches, and the host could not keep up.
5. ``SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND`` is ``python`` unless it is set: the compiled tree is
   built against the insides of SGLang's own torch, and took int64 for uint8 beside torch 2.11.
6. ``SGLANG_ENABLE_WAR_BARRIER`` is on unless it is set: the scheduler must not write what a forward
   under way still reads. SGLang's own default asks ``is_cuda``.
7. ``_is_cuda`` of ``pool_host.base``, which only decides whether the end of a host pool unregisters
   its memory.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.platforms.cuda import CudaDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_tiered.errors import ConfigError

DISPATCH_KEY = "cuda_native"

_hidden: list[str] = []
"""``torch.version.cuda`` while it is hidden."""


class NativeCudaPlatform(CudaDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """An out-of-tree platform whose device is CUDA, without compiled kernels of SGLang."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities(supports_triton=True, supports_pynccl=True)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Raises ``ConfigError`` for what needs kernels that are not there."""
        from sglang_tiered.integration.platforms.cpu import check_backends, copy_directly

        if server_args.speculative_algorithm is not None:
            raise ConfigError(
                f"--speculative-algorithm {server_args.speculative_algorithm} needs sgl_kernel, "
                "which is not installed; drop it."
            )
        check_backends(server_args, ("triton", "pod"))
        if server_args.attention_backend is None:
            server_args.attention_backend = self.get_default_attention_backend()
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"
        # SGLang captures for devices it knows, and asks other platforms for a runner of their own.
        server_args.disable_decode_cuda_graph = True
        server_args.disable_prefill_cuda_graph = True
        copy_directly(server_args)

    def get_default_attention_backend(self) -> str:
        return "triton"

    def get_dispatch_key_name(self) -> str:
        """SGLang takes what ``cuda_layers`` registered, and ``forward_native`` of the rest."""
        return DISPATCH_KEY

    def get_group_coordinator_device(self, local_rank: int) -> torch.device:
        return torch.device("cuda", local_rank)


def hide_cuda() -> None:
    """Make SGLang's ``is_cuda()`` false; to be called before it is defined. Idempotent."""
    if torch.version.cuda is not None:
        _hidden.append(torch.version.cuda)
        torch.version.cuda = None


def prepare() -> None:
    """Let this process serve with the platform, once SGLang is imported. Idempotent."""
    from sglang.srt.mem_cache.pool_host import base, dsa, mamba, mha, mla
    from sglang.srt.utils import is_cuda

    from sglang_tiered.integration.platforms import cuda_layers, host_copies

    if is_cuda():  # a process that imported SGLang before it could see this platform
        raise ConfigError("SGLang was imported before the platform for CUDA without sgl_kernel.")
    if _hidden:
        torch.version.cuda = _hidden.pop()
    os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    os.environ.setdefault("SGLANG_ENABLE_WAR_BARRIER", "1")
    base._is_cuda = True  # noqa: SLF001
    for module in (mha, mla, mamba, dsa):
        for function in host_copies.FUNCTIONS:
            setattr(module, function.__name__, function)
    cuda_layers.register(DISPATCH_KEY)
    from sglang.kernels.ops.attention import extend_attention

    extend_attention._is_cuda = True  # noqa: SLF001
    extend_attention.CUDA_CAPABILITY = torch.cuda.get_device_capability()
