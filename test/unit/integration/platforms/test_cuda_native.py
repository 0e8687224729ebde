"""Which platform serves on CUDA, and what it refuses. CUDA's answers are replaced."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit.commands import ran
from sglang_tiered.errors import ConfigError
from sglang_tiered.integration import plugin
from sglang_tiered.integration.platforms import cuda_native
from sglang_tiered.integration.platforms.cuda_native import NativeCudaPlatform

FIND_SPEC = importlib.util.find_spec


@pytest.mark.parametrize(
    ("machine", "kernels", "is_native"),
    [("cuda", True, False), ("cuda", False, True), ("rocm", False, False), ("cpu", False, False)],
)
def test_cuda_without_kernels_gets_the_native_platform(
    monkeypatch: pytest.MonkeyPatch, machine: str, kernels: bool, is_native: bool
) -> None:
    for module in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(module, "is_available", lambda: machine != "cpu")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", "6.4" if machine == "rocm" else None)
    monkeypatch.setattr(cuda_native, "_hidden", [])

    def find(name: str, package: str | None = None) -> Any:
        return (object() if kernels else None) if name == "sgl_kernel" else FIND_SPEC(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert plugin.lacks_kernels() is is_native
    if machine == "cuda":
        name = plugin.activate_platform()
        assert (name and pkgutil.resolve_name(name)) is (NativeCudaPlatform if is_native else None)
        assert torch.version.cuda == (None if is_native else "13.0")


def arguments(**given: Any) -> SimpleNamespace:
    backends = [f"{use}attention_backend" for use in ("", "prefill_", "decode_")]
    defaults: dict[str, Any] = dict.fromkeys(
        [*backends, "speculative_algorithm", "sampling_backend"]
    )
    defaults |= {"enable_hierarchical_cache": True, "hicache_io_backend": "kernel"}
    return SimpleNamespace(**{**defaults, "hicache_mem_layout": "page_first", **given})


def test_defaults_need_no_compiled_kernel() -> None:
    given = arguments()
    NativeCudaPlatform().apply_server_args_defaults(given)
    assert given.attention_backend == "triton"
    assert given.sampling_backend == "pytorch"
    assert given.hicache_io_backend == "direct"
    assert given.disable_decode_cuda_graph and given.disable_prefill_cuda_graph


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"attention_backend": "fa3"}, r"--attention-backend fa3 .*; pass triton or pod\."),
        ({"prefill_attention_backend": "fa3"}, r"--prefill-attention-backend fa3 .* or pod\."),
        ({"decode_attention_backend": "fa3"}, r"--decode-attention-backend fa3 .* or pod\."),
        ({"sampling_backend": "flashinfer"}, r"--sampling-backend flashinfer .*; pass pytorch\."),
        ({"speculative_algorithm": "EAGLE"}, r"--speculative-algorithm EAGLE .*; drop it\."),
        ({"hicache_mem_layout": "page_head"}, r"--hicache-mem-layout page_head .*; drop it\."),
    ],
)
def test_what_needs_compiled_kernels_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        NativeCudaPlatform().apply_server_args_defaults(arguments(**given))


def test_each_rank_has_a_device_of_its_own() -> None:
    """And SGLang takes none of its own ways for CUDA, whose kernels are not there."""
    found = NativeCudaPlatform()
    assert found.get_group_coordinator_device(1) == torch.device("cuda", 1)
    assert found.is_out_of_tree() and not found.is_cuda() and found.device_type == "cuda"
    assert found.capabilities.supports_triton and not found.capabilities.hicache_device_kernels


def test_sglang_imports_on_cuda_without_its_kernels() -> None:
    """In a process of its own: ``is_cuda`` keeps its first answer. What SGLang's server and its
    scheduler import at start asks for no compiled kernel."""
    program = """
        import torch
        torch.cuda.is_available = torch.accelerator.is_available = lambda: True
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        torch.cuda.get_device_name = lambda *_: "a device"
        torch.cuda.device_count = lambda: 1
        torch.version.cuda = "13.0"
        from sglang_tiered.integration import start
        start.prepare()
        from sglang.srt.platforms import current_platform
        from sglang.srt.utils import is_cuda
        assert type(current_platform).__name__ == "NativeCudaPlatform", current_platform
        assert not is_cuda()
        assert torch.version.cuda == "13.0"
        import sglang.srt.entrypoints.http_server
        import sglang.srt.layers.attention.triton_backend
        import sglang.srt.managers.scheduler
        import sglang.srt.models.llama
        from sglang.kernels.ops.attention import extend_attention
        from sglang.srt.mem_cache.pool_host import mha
        from sglang_tiered.integration.platforms import host_copies
        assert mha.transfer_kv_direct is host_copies.transfer_kv_direct
        from sglang.kernels.fused_op import BaseFusedOp
        from sglang.srt.layers.layernorm import RMSNorm
        from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
        from sglang_tiered.integration.platforms import cuda_layers
        registry = BaseFusedOp._oot_forward_registry[current_platform.get_dispatch_key_name()]
        assert registry[RotaryEmbedding] is cuda_layers.rotary_embedding
        norm = RMSNorm(8)
        assert norm._resolve_forward_method().__func__ is cuda_layers.rms_norm
        assert extend_attention.CUDA_CAPABILITY == (9, 0)
        from sglang.srt.environ import envs
        assert envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.get() == "python"
        assert envs.SGLANG_ENABLE_WAR_BARRIER.get()
        from types import SimpleNamespace
        from sglang.srt.mem_cache.pool_host import base
        base._cuda_host_unregister = lambda _: print("unregistered", end=" ")
        base.HostKVCache.destroy(SimpleNamespace(kv_buffer=torch.empty(1), pin_memory=True))
        print("imported")
    """
    done = ran(sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), timeout_s=240)
    assert done.stdout.endswith("unregistered imported\n"), done.stderr[-3000:]
