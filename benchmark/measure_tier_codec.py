"""What a codec of the tiers saves and costs on this disk, with the pages of a model's KV.

A region store keeps the pages of a prompt (the demo model's, unless --model names another), each
under many keys, as they are and by way of each codec: in turns, all stored, synced and loaded
again, the codec on whatever that costs. Processor seconds are those of the whole process and of a
GB of pages in memory, so what encoding and decoding adds is their difference.

    python benchmark/measure_tier_codec.py [--quick] [--model DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from measure_codecs import DTYPES, PAGE, ROOT, Model, spread
from sglang_tiered.storage.base import JobKind, Run
from sglang_tiered.storage.encoding import PageEncoding
from sglang_tiered.storage.region.engine import RegionEngine
from sglang_tiered.tools.machine import describe_machine, describe_versions
from storage_bench.own_engine import make_durable, move_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.codecs import PageLayout

CODECS = ("none", "zstd", "int8")
PREFIX_TOKENS = 512
NUM_ROUNDS, RUN_PAGES, NUM_IN_FLIGHT = 5, 16, 4
MiB, GB = 1 << 20, 1e9


class Figures(NamedTuple):
    """Of one life of a store. Bytes are those of pages in memory."""

    ratio: float  # of what a GiB of the disk holds
    store_gb_s: float
    load_gb_s: float
    store_cpu_s_per_gb: float
    load_cpu_s_per_gb: float


def life(
    directory: Path, codec: str, layout: PageLayout, pages: Sequence[np.ndarray], num_bytes: int
) -> Figures:
    encoding = PageEncoding(codec, layout, tiers=())
    engine = RegionEngine(
        directory,
        namespace=bytes(32),
        capacity_bytes=4 * num_bytes,
        region_bytes=64 * MiB,
        encoding=encoding,
    )
    num_pages = num_bytes // pages[0].nbytes // RUN_PAGES * RUN_PAGES
    keys = [number.to_bytes(32, "big") for number in range(num_pages)]
    sources = [(memoryview(pages[number % len(pages)]),) for number in range(num_pages)]
    targets = [(memoryview(np.zeros_like(page)),) for page in pages]
    whole = num_pages * pages[0].nbytes / GB
    took = []
    try:
        for kind, moved in ((JobKind.STORE, sources), (JobKind.LOAD, targets)):
            runs = [
                Run(
                    tuple(keys[at : at + RUN_PAGES]),
                    tuple(moved[number % len(moved)] for number in range(at, at + RUN_PAGES)),
                )
                for at in range(0, num_pages, RUN_PAGES)
            ]
            began, processor = time.perf_counter(), time.process_time()
            move_runs(engine, kind, runs, NUM_IN_FLIGHT if kind is JobKind.STORE else 1)
            if kind is JobKind.STORE:
                make_durable(engine)
            took.append((time.perf_counter() - began, time.process_time() - processor))
        ratio = num_pages * pages[0].nbytes / engine.stats().stored_bytes
    finally:
        engine.close()
    if codec != "int8" and any(
        bytes(target[0]) != page.tobytes() for target, page in zip(targets, pages, strict=True)
    ):
        raise SystemExit(f"{codec} changed a page")
    (store_s, store_cpu_s), (load_s, load_cpu_s) = took
    return Figures(ratio, whole / store_s, whole / load_s, store_cpu_s / whole, load_cpu_s / whole)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer bytes")
    parser.add_argument("--model", type=Path, help="a directory in Transformers' format")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    num_bytes = (64 if options.quick else 512) * MiB
    found: dict[str, dict[str, list[Figures]]] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch, torch.inference_mode():
        name, path = "as given", options.model
        if path is None:
            shape = "8m" if options.quick else "85m"
            name, path = f"demo {shape}, random weights", Path(scratch) / "demo"
            script = ROOT / "scripts" / "make_demo_model.py"
            subprocess.run(
                [sys.executable, str(script), str(path), "--shape", shape], check=True, timeout=300
            )
        for dtype in DTYPES:
            model, source = Model(path, dtype), random.Random(0)
            prompt = [source.randrange(32, 127) for _ in range(PREFIX_TOKENS)]
            pages = model.pages(model.prefill(prompt))
            figures = found[dtype] = defaultdict(list)
            for number in range(NUM_ROUNDS):
                for codec in (*CODECS[number % 3 :], *CODECS[: number % 3]):
                    directory = Path(scratch) / f"{dtype}-{codec}-{number}"
                    figures[codec].append(life(directory, codec, model.layout, pages, num_bytes))
                    shutil.rmtree(directory)
    ratios = summary(found)
    show(found, ratios, name)
    if options.json is not None:
        raw: dict[str, Any] = {
            dtype: {codec: [each._asdict() for each in lives] for codec, lives in figures.items()}
            for dtype, figures in found.items()
        }
        document = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {"model": name, "page_size": PAGE, "bytes": num_bytes},
            "ratios": ratios,
            "raw": raw,
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


def summary(found: dict[str, dict[str, list[Figures]]]) -> dict[str, dict[str, float]]:
    ratios: dict[str, dict[str, float]] = {}
    for dtype, figures in found.items():
        for codec, lives in figures.items():
            for field in ("store_cpu_s_per_gb", "load_cpu_s_per_gb"):
                values = [getattr(each, field) for each in lives]
                ratios[f"{field}_{codec}_{dtype}"] = spread(values)
            if codec == "none":
                continue
            both = list(zip(lives, figures["none"], strict=True))
            for field in ("store", "load"):
                values = [
                    getattr(a, f"{field}_gb_s") / getattr(b, f"{field}_gb_s") for a, b in both
                ]
                ratios[f"{field}_{codec}_over_none_{dtype}"] = spread(values)
            ratios[f"tokens_per_gib_{codec}_over_none_{dtype}"] = spread(
                [a.ratio / b.ratio for a, b in both]
            )
    return ratios


def show(
    found: dict[str, dict[str, list[Figures]]], ratios: dict[str, dict[str, float]], name: str
) -> None:
    table = Table("KV", "codec", *Figures._fields)
    for dtype, figures in found.items():
        for codec, lives in figures.items():
            middle = [spread(column)["value"] for column in zip(*lives, strict=True)]
            table.add_row(dtype, codec, *(f"{value:.2f}" for value in middle))
    console = Console(width=120)
    console.print(f"model: {name}")
    console.print(table)
    for field, value in ratios.items():
        console.print(f"{field}: {value['value']:.3f} ({value['min']:.3f} to {value['max']:.3f})")


if __name__ == "__main__":
    sys.exit(main())
