"""The cluster simulator beside one live server, on the same loaded trace (``docs/routing.md``).

Each run starts a fresh server of a demo model and measures what it takes by requests of their own.
Then it sends a scaled trace in open loop, and notes of each request when it was sent, its time to
the first token and the tiers its prompt came from. The same requests at the same times go through
the simulator, with one server of what was measured. Nothing of the trace's answers is used for it.

    python benchmark/bench_routing_live.py [TRACE ...] [--runs N] [--json FILE]

Traces are those of Mooncake below ``$SGLANG_TIERED_DATA``. The model was mended while looking at
``conversation``; ``synthetic`` was only measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from live_bench.asking import EXTRA, Measured, ask_server
from live_bench.modelled import TIERS, compare, kind_of
from serving_bench.replays import trace_requests
from serving_bench.setting import PAGE_SIZE, Geometry
from sglang_tiered.tools.machine import describe_machine, describe_versions
from sglang_tiered_lab.trace.inputs import Input
from sglang_tiered_lab.trace.reuse import measure as measure_reuse
from sglang_tiered_lab.trace.scaling import Scaling, scale

if TYPE_CHECKING:
    from serving_bench.client import Request, Sample
    from sglang_tiered_lab.trace.request import TraceRequest

ROOT = Path(__file__).parents[1]
SHAPE = "24m"
GEOMETRY = Geometry(device_tokens=6144, host_ratio=2, nvme_bytes=4 << 30)
LOAD = 0.6  # share of the time for which prefills would run if all that repeats were hit
NUM_OUTPUT = 8
SCALINGS = {
    "conversation": Scaling(tokens_max=2048, block_tokens=PAGE_SIZE, num_sessions=150, seed=6),
    "synthetic": Scaling(tokens_max=2048, block_tokens=PAGE_SIZE, num_sessions=220, seed=6),
}

console = Console()


class Spacing:
    """Sends a trace at ``LOAD`` of what the first server measured, and at the same times to those
    after it."""

    def __init__(self, name: str, trace: list[TraceRequest]) -> None:
        self._name, self._trace = name, trace
        self.duration_s = 0.0

    def __call__(self, measured: Measured) -> list[Request]:
        if not self.duration_s:
            hits = measure_reuse(self._trace).request_hits()
            batch_s, token_s, pair_s, _ = measured.prefill
            for request, hit in zip(self._trace, hits, strict=True):
                before = min(int(hit) * request.block_tokens, request.input_length - 1)
                new = request.input_length - before
                work_s = batch_s + token_s * new + pair_s * new * (before + new / 2)
                self.duration_s += work_s / LOAD
        return trace_requests(
            self._name, self._trace, duration_s=self.duration_s, num_output=NUM_OUTPUT
        )


def describe(trace: list[TraceRequest]) -> dict[str, float]:
    total = sum(request.input_length for request in trace)
    different = len({block for request in trace for block in request.block_ids}) * PAGE_SIZE
    hits = float(sum(measure_reuse(trace).request_hits())) * PAGE_SIZE
    return {
        "requests": len(trace),
        "prompt_tokens": total,
        "longest_prompt": max(request.input_length for request in trace),
        "different_over_memory": different / GEOMETRY.memory_tokens,
        "hit_rate_without_bounds": hits / total,
    }


def run_trace(name: str, num_runs: int, model: Path, folder: Path) -> dict[str, Any]:
    path = Path(os.environ["SGLANG_TIERED_DATA"]) / "mooncake" / f"{name}.jsonl"
    trace = scale(Input(path).load_timed(), SCALINGS[name])
    spaced = Spacing(name, trace)
    runs = []
    for number in range(num_runs):
        place = folder / f"{name}-{number}"
        place.mkdir()
        measured, samples, host_tokens = ask_server(model, place, GEOMETRY, NUM_OUTPUT, spaced)
        kind = kind_of(measured, GEOMETRY, host_tokens)
        found = compare(kind, trace, samples, NUM_OUTPUT)
        tell(f"{name} {number + 1}", found)
        runs.append(
            {
                "duration_s": spaced.duration_s,
                "measured": dataclasses.asdict(measured),
                **found,
                "samples": plain(samples),
            }
        )
    return {"trace": describe(trace), "runs": runs}


def plain(samples: list[Sample]) -> list[dict[str, Any]]:
    return [
        {
            "started_s": round(sample.started_s - samples[0].started_s, 6),
            "ttft_s": round(sample.ttft_s, 6),
            "num_prompt": sample.num_prompt,
            "cached": sample.cached,
        }
        for sample in samples
    ]


def tell(title: str, found: dict[str, Any]) -> None:
    live, modelled = found["live"], found["modelled"]
    times = ", ".join(f"{key} {live[key]:.3f} and {modelled[key]:.3f} s" for key in live)
    rates = ", ".join(
        f"{tier} {found['live_hit_rate'][tier]:.1%} and {found['modelled_hit_rate'][tier]:.1%}"
        for tier in TIERS
    )
    console.print(f"{title}: live and modelled TTFT: {times}; hit rates: {rates}")


def ratios(name: str, runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    values: dict[str, list[float]] = {}
    for run in runs:
        for key in ("mean", "p50", "p90"):
            quotient = run["modelled"][key] / run["live"][key]
            values.setdefault(f"{name}_modelled_over_live_{key}_ttft", []).append(quotient)
        for tier in TIERS:
            less = run["modelled_hit_rate"][tier] - run["live_hit_rate"][tier]
            values.setdefault(f"{name}_modelled_minus_live_{tier}_hit_rate", []).append(less)
    return {
        key: {"value": statistics.median(some), "min": min(some), "max": max(some), "n": len(some)}
        for key, some in values.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    known = ", ".join(SCALINGS)
    parser.add_argument("traces", metavar="TRACE", nargs="*", help=f"of {known}; all without")
    parser.add_argument("--runs", type=int, default=3, help="servers for each trace")
    parser.add_argument("--json", metavar="FILE", type=Path)
    options = parser.parse_args()
    if unknown := set(options.traces) - set(SCALINGS):
        parser.error(f"{', '.join(sorted(unknown))} is no trace; choose from {known}")
    if "SGLANG_TIERED_DATA" not in os.environ:
        parser.error("SGLANG_TIERED_DATA must name the folder of the traces")
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-live-") as text:
        folder = Path(text)
        maker = [sys.executable, str(ROOT / "scripts" / "make_demo_model.py")]
        model = folder / "model"
        subprocess.run([*maker, str(model), "--shape", SHAPE], check=True)
        for name in options.traces or SCALINGS:
            found[name] = run_trace(name, options.runs, model, folder)
    if options.json:
        options.json.write_text(json.dumps(document(found), indent=1) + "\n")
    return 0


def document(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {
            "shape": SHAPE,
            "device_tokens": GEOMETRY.device_tokens,
            "host_tokens": GEOMETRY.host_tokens,
            "nvme_bytes": GEOMETRY.nvme_bytes,
            "page_tokens": PAGE_SIZE,
            "load": LOAD,
            "num_output": NUM_OUTPUT,
            "extra_flags": EXTRA,
            "traces": {name: one["trace"] for name, one in found.items()},
        },
        "ratios": {
            key: value
            for name, one in found.items()
            for key, value in ratios(name, one["runs"]).items()
        },
        "raw": {name: one["runs"] for name, one in found.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
