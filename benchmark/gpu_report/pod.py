"""(b) Mixed batches: ``bench_pod_attention``, and what a layer costs the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_report.figures import Part, run_part

BENCHMARKS = Path(__file__).resolve().parents[1]


def run(part: Part) -> None:
    if part.rehearse:
        done = _bench("bench_pod_attention.py", "--check", TRITON_INTERPRET="1")
        part.save("pod_results_equal", int("All results are equal." in done), "yes")
    else:
        measure(part, *(["--samples", "7"] if part.quick else []))
    _save_host_costs(part)


def measure(part: Part, *given: str) -> None:
    """Keep what was measured of the mixes that were reached, also when this part is stopped."""
    figures = part.folder / "pod.json"
    try:
        print(_bench("bench_pod_attention.py", "--json", str(figures), *given), flush=True)
    finally:
        if figures.exists():
            save_document(part, json.loads(figures.read_text()))


def save_document(part: Part, document: dict[str, Any]) -> None:
    """Keep the ratios that ``bench_pod_attention`` wrote, and all it wrote with them."""
    for name, ratio in document["ratios"].items():
        spread = {key: ratio[key] for key in ("min", "max", "n")}
        part.save(f"pod_{name}", ratio["value"], "ratio", **spread)
    part.save("pod_mixes", len(document["raw"]), "mixes", document=document)


def _save_host_costs(part: Part) -> None:
    figures = part.folder / "launch.json"
    try:
        _bench("bench_pod_launch.py", "--quick", "--json", str(figures))
    except RuntimeError as error:  # another Triton may want more of its driver
        part.skip("pod_host", str(error))
        return
    raw = json.loads(figures.read_text())["raw"]["layer_us"]
    for name, values in raw.items():
        part.save_samples(f"pod_host: {name}", values, "us a layer")


def _bench(name: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    run_part("pod", run)
