"""Ratios of one run, the table they are read in, and the files they end in."""

from __future__ import annotations

import datetime
import importlib.metadata
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pod_bench.mixes import Ceilings, Heads, Mix


# What fusion has to beat: prefill and decode as launches of their own, and FlashInfer's fusion.
BEST_OF = (
    "stock_serial",
    "stock_streams",
    "flashinfer_fa2_serial",
    "flashinfer_fa3_serial",
    "flashinfer_pod",
)


@dataclass(frozen=True)
class MixResult:
    """samples: seconds per contender, sample by sample in turn. graphs: measured as CUDA graphs."""

    mix: Mix
    samples: dict[str, list[float]]
    least_s: float
    plan_s: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    graphs: dict[str, bool] = field(default_factory=dict)
    note: str = ""

    def median_s(self, name: str) -> float:
        return statistics.median(self.samples[name])

    @property
    def best_other(self) -> str | None:
        """The fastest that is not ours; a whole mixed batch in SGLang's extend does not count."""
        present = [name for name in BEST_OF if name in self.samples]
        return min(present, key=self.median_s) if present else None

    def quotients(self, numerator: str, denominator: str | None) -> list[float]:
        """Sample by sample; empty where one of them was not measured."""
        if denominator not in self.samples or numerator not in self.samples:
            return []
        pairs = zip(self.samples[numerator], self.samples[denominator], strict=True)
        return [n / d for n, d in pairs]

    def ratios(self) -> dict[str, list[float]]:
        found = {
            "fused_over_own_serial": self.quotients("own_fused", "own_serial"),
            "fused_over_stock_mixed": self.quotients("own_fused", "stock_mixed"),
            "fused_over_best_serial": self.quotients("own_fused", self.best_other),
        }
        return {name: values for name, values in found.items() if values}


class Report:
    """All mixes of a run."""

    def __init__(self, heads: Heads, ceilings: Ceilings, settings: dict[str, Any]) -> None:
        self.heads, self.ceilings, self.settings = heads, ceilings, settings
        self.results: list[MixResult] = []

    def rows(self, result: MixResult) -> list[list[str]]:
        """name, microseconds (spread), over own serial, over the best other, over the roofline."""
        rows = []
        for name in sorted(result.samples, key=result.median_s):
            micro = [1e6 * value for value in result.samples[name]]
            over = [result.quotients(name, "own_serial"), result.quotients(name, result.best_other)]
            rows.append(
                [
                    name,
                    f"{statistics.median(micro):.1f} ({min(micro):.1f} to {max(micro):.1f})",
                    *(f"{statistics.median(values):.3f}" if values else "" for values in over),
                    f"{result.median_s(name) / result.least_s:.2f}",
                    f"{1e3 * result.plan_s.get(name, 0):.2f}",
                    "graph" if result.graphs.get(name) else "events",
                ]
            )
        return rows

    def text(self, result: MixResult) -> str:
        header = [
            *("contender", "us", "over own serial", "over best other", "over roofline"),
            *("plan ms", "timed by"),
        ]
        rows = [header, *self.rows(result)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = [f"{result.mix.name}: roofline {1e6 * result.least_s:.1f} us; {result.note}"]
        lines += ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows]
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """As ``--json`` writes it. A ratio's own name holds the samples of all mixes; with a mix's
        name behind it, that mix's."""
        pooled: dict[str, list[float]] = {}
        ratios: dict[str, dict[str, float]] = {}
        for result in self.results:
            for name, values in result.ratios().items():
                pooled.setdefault(name, []).extend(values)
                ratios[f"{name}: {result.mix.name}"] = _summary(values)
        return {
            "machine": describe_device(),
            "versions": describe_versions(),
            "settings": {
                **self.settings,
                "heads": vars(self.heads),
                "matmul_tflops": self.ceilings.flops / 1e12,
                "copy_gb_per_s": self.ceilings.bytes / 1e9,
                "best_other": {r.mix.name: r.best_other for r in self.results},
            },
            "ratios": {name: _summary(values) for name, values in pooled.items()} | ratios,
            "raw": {
                result.mix.name: {
                    "seconds": result.samples,
                    "roofline_s": result.least_s,
                    "plan_s": result.plan_s,
                    "relative_errors": result.errors,
                    "cuda_graph": result.graphs,
                    "note": result.note,
                }
                for result in self.results
            },
        }

    def plot(self, path: Path) -> None:
        """Bars per mix: every contender's time over the roofline. Needs matplotlib."""
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot

        names = sorted({name for result in self.results for name in result.samples})
        figure, axes = pyplot.subplots(figsize=(2 + 1.6 * len(self.results), 5))
        width = 0.8 / max(1, len(names))
        for number, name in enumerate(names):
            found = [(i, r) for i, r in enumerate(self.results) if name in r.samples]
            axes.bar(
                [i + number * width for i, _ in found],
                [r.median_s(name) / r.least_s for _, r in found],
                width,
                label=name,
            )
        axes.set_xticks([i + 0.4 for i in range(len(self.results))])
        axes.set_xticklabels([r.mix.name for r in self.results], rotation=25, ha="right")
        axes.set_ylabel("time over the roofline")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {
        "value": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def describe_device() -> dict[str, Any]:
    """What it ran on, without anything that names the machine itself."""
    described: dict[str, Any] = {"date": datetime.date.today().isoformat(), "device": "cpu"}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        described |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30),
            "capability": f"{properties.major}.{properties.minor}",
        }
    return described


def describe_versions() -> dict[str, str]:
    versions = {"cuda": str(torch.version.cuda)}
    for package in ("torch", "triton", "sglang", "flashinfer-python", "sglang-tiered"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
