"""What a layer costs the host, of a mixed batch and of pages from and to host memory: Python from
``pod_attention``, and from a copy that SGLang calls, to CUDA's launch.

Runs without a GPU. The kernels are compiled for sm_90 and dispatched by Triton as on a server, but
for its driver: what loads and launches code does nothing here, so what CUDA itself takes for a
launch is not in the figures. Tensors lie in host memory and are never read. Times are processor
time of the thread.

    python benchmark/bench_pod_launch.py [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import sglang.srt.utils  # noqa: F401 - before a module of a platform, as a server has it
import torch
import triton
from triton.backends.compiler import GPUTarget

from pod_bench.report import describe_device, describe_versions
from sglang_tiered.integration.platforms import host_copies
from sglang_tiered_kernels.page_copy import interface as copies_interface
from sglang_tiered_kernels.pod_attention import PodShape, Roles, launch, make_plan, pod_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LLAMA_8B = PodShape(
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    page_size=64,
    q_dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
)
LAYERS = 32
SLOTS = 1 << 12
COPIED_TOKENS = 8192


class Driver:
    """Triton's view of an H200 that does nothing."""

    launcher_cls = staticmethod(lambda source, metadata: lambda *given: None)

    def __init__(self) -> None:
        self.utils = self

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, *given: Any) -> tuple[int, int, int, int, int]:
        return 0, 0, 128, 0, 1024

    def unload_module(self, module: Any) -> None:
        """There is none."""


class Nothing:
    """In a kernel's place: what is left is the cost of making its arguments."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given, **options: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a few rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 3 if options.quick else 21
    raw = measure(rounds)
    raw |= copies_us(rounds)
    print(f"microseconds a layer, median of {rounds} rounds of {LAYERS} layers")
    for name, values in raw.items():
        spread = f"({min(values):.1f} to {max(values):.1f})"
        print(f"  {name:34s} {statistics.median(values):7.1f}  {spread}")
    if options.json:
        write(options.json, raw)


def measure(rounds: int, shape: PodShape = LLAMA_8B) -> dict[str, list[float]]:
    """Microseconds a layer of each way, by round; ways take turns."""
    triton.runtime.driver.set_active(Driver())
    ways = {
        "fused": (Roles.FUSED, False),
        "fused, arguments alone": (Roles.FUSED, True),
        "one launch a role": (Roles.SERIAL, False),
        "one launch a role, arguments alone": (Roles.SERIAL, True),
    }
    raw: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, (roles, is_alone) in ways.items():
            with without_kernels() if is_alone else contextlib.nullcontext():
                spent = layer_us(shape, roles)
            if number:  # the first compiles
                raw[name].append(spent)
    return raw


def layer_us(shape: PodShape, roles: Roles) -> float:
    """Of a forward with a new plan: a chunk of 1,024 tokens beside 32 rows that decode at 2,048."""
    extend, prefix = [1024] + [1] * 32, [3072] + [2048] * 32
    plan = make_plan(extend, prefix, shape, num_sms=132)
    tokens = plan.num_tokens
    q = torch.empty(tokens, shape.num_q_heads, shape.head_dim, dtype=shape.q_dtype)
    caches = [
        torch.empty(SLOTS, shape.num_kv_heads, shape.head_dim, dtype=shape.kv_dtype)
        for _ in range(2)
    ]
    out = torch.empty_like(q)
    starts = torch.zeros(len(extend) + 1, dtype=torch.int32)
    slots = torch.zeros(plan.num_kv_tokens, dtype=torch.int32)
    plan.workspace(), plan.counters()
    plan.device = torch.device("meta")  # from here on no CPU
    plan.kept["supported"] = True
    begin = time.thread_time()
    for _ in range(LAYERS):
        pod_attention(q, *caches, out, starts, slots, plan, sm_scale=0.088, roles=roles)
    return (time.thread_time() - begin) / LAYERS * 1e6


def copies_us(rounds: int) -> dict[str, list[float]]:
    """Microseconds a layer of ``COPIED_TOKENS`` tokens, in pages of 64 in no order, by round."""
    page = 64
    shape = (COPIED_TOKENS // page, LAYERS, page, 8, 128)
    host = [torch.empty(shape, dtype=torch.bfloat16) for _ in range(2)]
    device = [torch.empty(COPIED_TOKENS, 8, 128, dtype=torch.bfloat16) for _ in range(2 * LAYERS)]
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(1))
    slots = (order[:, None] * page + torch.arange(page)).flatten()
    raw: dict[str, list[float]] = {"host memory to device": [], "device to host memory": []}
    kept, copies_interface.by_kernel = copies_interface.by_kernel, lambda device: True
    try:
        for number in range(rounds + 1):
            begin = time.thread_time()
            for layer in range(LAYERS):
                host_copies.transfer_kv_per_layer_direct_pf_lf(
                    host, device[layer::LAYERS], slots, slots, layer, page
                )
            middle = time.thread_time()
            host_copies.transfer_kv_all_layer_direct_lf_pf(device, host, slots, slots, page)
            spent = middle - begin, time.thread_time() - middle
            for values, seconds in zip(raw.values(), spent, strict=True):
                if number:  # the first compiles
                    values.append(seconds / LAYERS * 1e6)
    finally:
        copies_interface.by_kernel = kept
    return raw


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    kernels: Any = launch
    kept = launch.pod_kernel, launch.merge_kernel
    kernels.pod_kernel = kernels.merge_kernel = Nothing()
    try:
        yield
    finally:
        kernels.pod_kernel, kernels.merge_kernel = kept


def write(path: str | Path, raw: dict[str, list[float]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(
            {
                "machine": describe_device(),
                "versions": describe_versions(),
                "settings": {"layers": LAYERS, "shape": "Llama-3-8B"},
                "ratios": {},
                "raw": {"layer_us": raw},
            },
            file,
            indent=1,
        )


if __name__ == "__main__":
    main()
