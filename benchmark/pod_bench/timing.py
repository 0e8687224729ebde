"""Times on the device: CUDA graphs where they can be, events around them, everybody in turn."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pod_bench.mixes import Ceilings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pod_bench.contenders import Contender, Output


SAMPLE_S = 0.01
_WARM_UPS = 3


@dataclass
class Timed:
    """A contender, warm. call: one computation, replayed from a graph if ``graph``. output: where
    its last result is. repeats: computations per sample."""

    contender: Contender
    call: Callable[[], object]
    graph: bool
    output: Output
    repeats: int = 1


def prepare(contender: Contender) -> Timed:
    """Compile, warm up and capture. Launching from Python takes longer than small batches run, so
    without a graph its cost would be measured; where capturing fails, events it is."""
    for _ in range(_WARM_UPS):
        output = contender.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            output = contender.run()
        timed = Timed(contender, graph.replay, True, output)
    except RuntimeError:
        torch.cuda.synchronize()
        timed = Timed(contender, contender.run, False, contender.run())
    timed.call()
    once = _elapsed_s(timed.call, 3)
    timed.repeats = max(1, min(200, round(SAMPLE_S / once)))
    return timed


def measure(contenders: Sequence[Timed], num_samples: int) -> dict[str, list[float]]:
    """Seconds per computation. Everybody once per round, in an order that turns each round, so
    that drifts of clock and temperature meet all alike."""
    samples: dict[str, list[float]] = {timed.contender.name: [] for timed in contenders}
    for number in range(num_samples):
        for timed in contenders if number % 2 == 0 else reversed(contenders):
            timed.call()  # the one before left its own data in the cache
            samples[timed.contender.name].append(_elapsed_s(timed.call, timed.repeats))
    return samples


def measure_ceilings(dtype: torch.dtype, device: torch.device) -> Ceilings:
    """A matrix product of 8192 and a copy of 2 GiB: medians of seven."""
    size = 8192
    left = torch.randn(size, size, dtype=dtype, device=device)
    right = torch.randn(size, size, dtype=dtype, device=device)
    out = torch.empty_like(left)
    source = torch.empty(2 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def product() -> None:
        torch.matmul(left, right, out=out)

    def copy() -> None:
        target.copy_(source)

    product()
    copy()
    return Ceilings(
        flops=2 * size**3 / statistics.median(_elapsed_s(product, 10) for _ in range(7)),
        bytes=2 * source.nbytes / statistics.median(_elapsed_s(copy, 5) for _ in range(7)),
    )


def _elapsed_s(call: Callable[[], object], repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats
