"""Answers as the serving benchmark's client takes them, and a benchmark that measures none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serving_bench.bench import Bench
from serving_bench.client import Sample
from storage_bench.figures import Report
from storage_bench.workspace import Workspace


def sample(
    label: str = "a",
    *,
    ttft_s: float = 1.0,
    started_s: float = 0.0,
    latency_s: float = 2.0,
    prompt: int = 200,
    reusable: int = 0,
    output: tuple[int, ...] = (1, 2),
    **cached: int,
) -> Sample:
    """``cached``: tokens of the prompt by the tier that they were found in."""
    tiers = {"device": 0, "host": 0, "storage": 0, **cached}
    return Sample(label, started_s, ttft_s, (0.1,), latency_s, prompt, reusable, output, tiers)


def make_bench(folder: Path, setting: Any, *names: str) -> Bench:
    return Bench(
        setting=setting,
        workspace=Workspace(folder, allow_tmpfs=True),
        report=Report(),
        model=folder,
        kv_bytes_per_token=1000,
        names=list(names),
    )
