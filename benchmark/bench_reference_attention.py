"""Attention on a CPU: the ``reference`` backend beside SGLang's ``torch_native``, layer by layer.

Both backends run on the same pools and the same forward batch, in turn, KV write included, on one
thread (two cores are too few to keep both to ourselves). Outputs are compared before a ratio is
printed.

    python benchmark/bench_reference_attention.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from sglang_tiered.tools.machine import describe_machine, describe_versions

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns about kernels a CPU does not have
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sglang_tiered.integration.attention.reference import ReferenceAttnBackend

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD_DIM = 64
POOL_TOKENS = 70_000
NUM_RUNS = 7
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Case:
    """One forward. ``lengths``: per sequence (cached tokens, new tokens)."""

    name: str
    lengths: tuple[tuple[int, int], ...]

    @property
    def is_decode(self) -> bool:
        return all(new == 1 for _, new in self.lengths) and self.name.startswith("decode")


def make_cases() -> list[Case]:
    source = random.Random(0)
    ragged = tuple((source.randint(0, 399), 1) for _ in range(256))
    return [
        Case("extend 28 on 1472", ((1472, 28),)),
        Case("extend 1472 on 0", ((0, 1472),)),
        Case("extend 1472 on 1472", ((1472, 1472),)),
        Case("extend 8 x (28 on 1472)", ((1472, 28),) * 8),
        Case("decode 1 x 1500", ((1499, 1),)),
        Case("decode 8 x 1500", ((1499, 1),) * 8),
        Case("decode 256, lengths 1 to 400", ragged),
    ]


def make_forwards(
    case: Case, dtype: torch.dtype, num_heads: int, num_kv_heads: int
) -> dict[str, Callable[[], torch.Tensor]]:
    """One forward per backend, on shared pools with random content."""
    torch.manual_seed(0)
    rows = ReqToTokenPool(
        size=len(case.lengths), max_context_len=4096, device="cpu", enable_memory_saver=False
    )
    pool = MHATokenToKVPool(
        size=POOL_TOKENS,
        page_size=1,
        dtype=dtype,
        head_num=num_kv_heads,
        head_dim=HEAD_DIM,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    pool.k_buffer[0].normal_()
    pool.v_buffer[0].normal_()
    totals = [cached + new for cached, new in case.lengths]
    slots = torch.randperm(POOL_TOKENS - 1)[: sum(totals)].add(1).split(totals)
    for row, own in enumerate(slots):
        rows.req_to_token[row, : len(own)] = own
    new_lengths = [new for _, new in case.lengths]
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE if case.is_decode else ForwardMode.EXTEND,
        req_pool_indices=torch.arange(len(totals)),
        seq_lens=torch.tensor(totals),
        encoder_lens=None,
        out_cache_loc=torch.cat(
            [own[len(own) - new :] for own, new in zip(slots, new_lengths, strict=True)]
        ),
        out_cache_loc_is_physical=False,
        extend_seq_lens=None if case.is_decode else torch.tensor(new_lengths),
        extend_prefix_lens=(
            None if case.is_decode else torch.tensor([cached for cached, _ in case.lengths])
        ),
    )
    layer = RadixAttention(num_heads, HEAD_DIM, HEAD_DIM**-0.5, num_kv_heads, 0)
    num_new = sum(new_lengths)
    q = torch.randn(num_new, num_heads * HEAD_DIM, dtype=dtype)
    k = torch.randn(num_new, num_kv_heads, HEAD_DIM, dtype=dtype)
    v = torch.randn(num_new, num_kv_heads, HEAD_DIM, dtype=dtype)
    runner = SimpleNamespace(device="cpu", req_to_token_pool=rows, token_to_kv_pool=pool)
    forwards: dict[str, Callable[[], torch.Tensor]] = {}
    for name, kind in (("native", TorchNativeAttnBackend), ("reference", ReferenceAttnBackend)):
        backend = kind(runner)
        backend.init_forward_metadata(batch)
        method = backend.forward_decode if case.is_decode else backend.forward_extend

        def forward(method: Any = method) -> torch.Tensor:
            result: torch.Tensor = method(q, k, v, layer, batch)
            return result

        forwards[name] = forward
    return forwards


def measure(forwards: dict[str, Callable[[], torch.Tensor]]) -> dict[str, list[float]]:
    """Milliseconds of each run, the backends in turn, after one run of each to warm up."""
    for forward in forwards.values():
        forward()
    runs: dict[str, list[float]] = {name: [] for name in forwards}
    for _ in range(NUM_RUNS):
        for name, forward in forwards.items():
            start = time.perf_counter()
            forward()
            runs[name].append((time.perf_counter() - start) * 1e3)
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="float32 and one head count only")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtypes = [torch.float32] if options.quick else [torch.float32, torch.bfloat16]
    heads = [(12, 4)] if options.quick else [(6, 2), (12, 4)]
    settings = [(c, h, d) for c in make_cases() for h in heads for d in dtypes]

    table = Table("queries on prefix", "heads / KV", "dtype", "native ms", "reference ms", "ratio")
    ratios: dict[str, dict[str, float]] = {}
    raw: dict[str, dict[str, list[float]]] = {}
    with torch.inference_mode():
        for case, (num_heads, num_kv_heads), dtype in tqdm(settings, leave=False):
            forwards = make_forwards(case, dtype, num_heads, num_kv_heads)
            difference = (forwards["native"]() - forwards["reference"]()).abs().max().item()
            if difference > TOLERANCE[dtype]:
                print(f"{case.name}: the backends differ by {difference}; nothing to compare.")
                return 1
            runs = measure(forwards)
            pairs = [n / r for n, r in zip(runs["native"], runs["reference"], strict=True)]
            label = str(dtype).removeprefix("torch.")
            key = f"{case.name}, {num_heads}/{num_kv_heads}, {label}"
            raw[key] = runs
            ratios[key] = {
                "value": statistics.median(pairs),
                "min": min(pairs),
                "max": max(pairs),
                "n": len(pairs),
            }
            native, own = (statistics.median(runs[name]) for name in ("native", "reference"))
            table.add_row(
                case.name,
                f"{num_heads} / {num_kv_heads}",
                label,
                f"{native:.2f}",
                f"{own:.2f}",
                f"{ratios[key]['value']:.1f} ({min(pairs):.1f} to {max(pairs):.1f})",
            )
    Console(width=110).print(table)
    if options.json:
        document = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {"threads": 1, "head_dim": HEAD_DIM, "runs": NUM_RUNS},
            "ratios": ratios,
            "raw": raw,
        }
        options.json.write_text(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
