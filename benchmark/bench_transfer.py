"""The KV handoff from prefill to decode: goodput over loopback, CPU time, and time to first token.

Two processes hand over the pages of one prompt at a time, by each way in turns, beside plain TCP
sockets, and plain ZeroMQ, that do nothing but gather, send, receive and scatter the same pages. All
include the copies out of and into the pools; the endpoints also checksum, confirm and bound. Where
Mooncake's transfer engine is installed, it takes turns with them over TCP. Then plain sockets
alone: pages one by one beside slabs. Then a prefill and a decode server answer cold prompts beside
one server. No ratio is printed when bytes or tokens differ.

    python benchmark/bench_transfer.py [--quick] [--no-servers] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_tiered.tools.machine import describe_machine, describe_versions
from transfer_bench import codecs, goodput, handoff, mooncake
from transfer_bench.pools import Shape

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = (512, 2048, 8192)
COLLATED_PAGES = (1, 16, 64)  # tokens per page of the experiment with slabs
WANTED = {
    "tcp_over_raw_tcp": 0.8,
    "tcp_cpu_over_raw_tcp": 0.8,
    "same_host_over_tcp": 2.0,
    "tcp_over_mooncake_tcp": 1.0,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, shorter prompts")
    parser.add_argument("--no-servers", action="store_true", help="the endpoints only")
    parser.add_argument("--page-size", type=int, default=64, help="tokens per page (64)")
    parser.add_argument("--json", type=Path, help="write figures there")
    arguments = parser.parse_args()
    if arguments.page_size < 1 or 16384 % arguments.page_size:
        parser.error(f"--page-size {arguments.page_size} must divide 16384; 64 is a good value")
    console = Console()
    num_rounds = 5 if arguments.quick else 11
    tokens = 8192 if arguments.quick else 16384
    shape = Shape(8, tokens // arguments.page_size, arguments.page_size)
    absent = mooncake.why_not()
    ways = [*goodput.WAYS, goodput.ZEROMQ, *([] if absent else [goodput.MOONCAKE])]
    samples = goodput.measure(shape, num_rounds, ways)
    ratios = _ratios(samples)
    console.print(_goodput_table(samples, shape))
    if absent:
        console.print(f"mooncake_tcp was left out: {absent}")
    collated, collation = _measure_collation(console, tokens, num_rounds)
    ratios |= collated
    console.print(_ratio_table(ratios))
    raw: dict[str, Any] = {
        "mooncake_tcp": absent or "measured",
        "collation": collation,
        "goodput": {name: vars(value) for name, value in samples.items()},
        "prompt_bytes": shape.prompt_bytes,
        "codecs": {name: vars(value) for name, value in _measure_codecs(console).items()},
    }
    if not arguments.no_servers:
        raw["ttft"] = _measure_handoff(console, arguments.quick)
    if arguments.json is not None:
        settings = {
            "rounds": num_rounds,
            "page_size": shape.page_size,
            "layers": shape.num_layers,
            "prompt_bytes": shape.prompt_bytes,
        }
        result = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": settings,
            "ratios": ratios,
            "raw": raw,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def _ratios(samples: dict[str, goodput.Samples]) -> dict[str, dict[str, float]]:
    """Of goodput, and of processor seconds: both sides of a quotient are of the same minute."""
    pairs = {
        "tcp_over_raw_tcp": ("tcp", goodput.RAW),
        "zeromq_over_raw_tcp": (goodput.ZEROMQ, goodput.RAW),
        "tcp_over_zeromq": ("tcp", goodput.ZEROMQ),
        "same_host_over_tcp": ("same host", "tcp"),
        "tcp_over_mooncake_tcp": ("tcp", goodput.MOONCAKE),
        "same_host_over_mooncake_tcp": ("same host", goodput.MOONCAKE),
    }
    found = {
        name: _quotients(samples[ours].seconds, samples[other].seconds)
        for name, (ours, other) in pairs.items()
        if other in samples
    }
    found["tcp_cpu_over_raw_tcp"] = _quotients(samples["tcp"].cpu, samples[goodput.RAW].cpu)
    return found


def _quotients(ours: list[float], other: list[float]) -> dict[str, float]:
    quotients = [b / a for a, b in zip(ours, other, strict=True)]
    return {
        "value": statistics.median(quotients),
        "min": min(quotients),
        "max": max(quotients),
        "n": len(quotients),
    }


def _measure_collation(
    console: Console, tokens: int, num_rounds: int
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Plain sockets with slabs over plain sockets with one transfer per page, by page size."""
    ratios: dict[str, dict[str, float]] = {}
    raw: dict[str, Any] = {}
    for page_size in COLLATED_PAGES:
        shape = Shape(8, tokens // page_size, page_size)
        samples = goodput.measure(shape, num_rounds, [goodput.PAGES])
        console.print(_goodput_table(samples, shape))
        name = f"slabs_over_pages_of_{page_size}"
        ratios[name] = _quotients(samples[goodput.RAW].seconds, samples[goodput.PAGES].seconds)
        raw[str(page_size)] = {way: vars(value) for way, value in samples.items()}
    return ratios, raw


def _goodput_table(samples: dict[str, goodput.Samples], shape: Shape) -> Table:
    size = shape.prompt_bytes / 1e9
    table = Table(
        "way",
        "GB/s median",
        "min",
        "max",
        "CPU s per GB",
        title=f"{size:.2f} GB per prompt, pages of {shape.page_size} tokens",
    )
    for name, found in samples.items():
        speeds = [size / seconds for seconds in found.seconds]
        cpu = statistics.median(found.cpu) / size
        table.add_row(
            name,
            f"{statistics.median(speeds):.2f}",
            f"{min(speeds):.2f}",
            f"{max(speeds):.2f}",
            f"{cpu:.2f}",
        )
    return table


def _ratio_table(ratios: dict[str, dict[str, float]]) -> Table:
    table = Table("ratio", "median", "min", "max", "wanted")
    for name, found in ratios.items():
        figures = (f"{found[key]:.2f}" for key in ("value", "min", "max"))
        table.add_row(name, *figures, f"{WANTED[name]:.2f}" if name in WANTED else "")
    return table


def _measure_codecs(console: Console) -> dict[str, codecs.CodecSamples]:
    found = codecs.measure(5)
    columns = ("codec", "encode GB/s", "decode GB/s", "bytes saved", "error", "pays below")
    table = Table(*columns, title="wire codecs, one core, bfloat16")
    for name, samples in found.items():
        speeds = [statistics.median(each) for each in (samples.encode, samples.decode)]
        table.add_row(
            name,
            *(f"{speed:.2f}" for speed in speeds),
            f"{samples.saving:.2f} times fewer",
            f"{samples.error:.2%} of the range",
            f"{8 * min(speeds):.1f} Gbit/s",
        )
    console.print(table)
    return found


def _measure_handoff(console: Console, quick: bool) -> dict[str, Any]:
    lengths = LENGTHS[:2] if quick else LENGTHS
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        command = [sys.executable, str(ROOT / "scripts/make_demo_model.py"), str(model)]
        subprocess.run([*command, "--shape", "24m"], check=True, stdout=subprocess.DEVNULL)
        found = handoff.measure(model, Path(folder), lengths, 5 if quick else 7)
    table = Table("prompt", "prefill and decode", "one server", "added", "spread")
    for length, ttft in found.items():
        added = [a - b for a, b in zip(ttft.both, ttft.single, strict=True)]
        table.add_row(
            f"{length:,}",
            f"{1e3 * statistics.median(ttft.both):.0f} ms",
            f"{1e3 * statistics.median(ttft.single):.0f} ms",
            f"{1e3 * statistics.median(added):.0f} ms",
            f"{1e3 * min(added):.0f} to {1e3 * max(added):.0f} ms",
        )
    console.print(table)
    return {str(length): vars(ttft) for length, ttft in found.items()}


if __name__ == "__main__":
    main()
