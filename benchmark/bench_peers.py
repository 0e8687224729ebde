"""Pages fetched from another server beside a plain socket and beside the holder's own disk.

Two processes on one machine: one holds pages in a region store, the other fetches them, by way of
the page server and client, and the same bytes out of the holder's memory over a plain TCP socket,
in turns; the holder also loads them for itself. No figure is printed when a byte differs. Then two
servers, of which one resumes the conversations that the other one opened.
``README.md`` in this folder says what each figure means.

    python benchmark/bench_peers.py [--quick] [--no-pages] [--no-servers] [--directory DIR]
        [--allow-tmpfs] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from rich.console import Console

from object_bench import resume
from peer_bench.redis_process import find_redis, run_redis
from peer_bench.sides import (
    LOCAL,
    PEER_HOST,
    PEER_KEYS,
    PEER_MEMORY,
    PEER_PLAIN,
    RAW,
    RAW_DISK,
    measure,
)
from sglang_tiered.tools.machine import describe_machine, describe_versions
from sglang_tiered.wire.keys import PEER, make_keys
from storage_bench.figures import DifferentBytesError, Report, quotients, size_name
from storage_bench.workspace import UnusableDirectoryError, Workspace, default_directory

PAGE_SIZES = (256 << 10, 1 << 20, 8 << 20)
FIGURES = {
    "peer_over_raw_tcp": (PEER_PLAIN, RAW),
    "peer_memory_over_raw_tcp": (PEER_MEMORY, RAW),
    "peer_host_memory_over_raw_tcp": (PEER_HOST, RAW),
    "peer_host_memory_over_peer": (PEER_HOST, PEER_PLAIN),
    "peer_over_raw_tcp_from_disk": (PEER_PLAIN, RAW_DISK),
    "peer_over_local": (PEER_PLAIN, LOCAL),
    "peer_encrypted_over_raw_tcp": (PEER_KEYS, RAW),
    "peer_encrypted_over_local": (PEER_KEYS, LOCAL),
}
CPU_FIGURES = {  # of processor seconds
    "peer_memory_cpu_over_raw_tcp": (PEER_MEMORY, RAW),
    "peer_host_memory_cpu_over_peer": (PEER_HOST, PEER_PLAIN),
    "peer_cpu_over_raw_tcp_from_disk": (PEER_PLAIN, RAW_DISK),
}


def measure_size(
    root: Path, keys: Path, page_bytes: int, num_bytes: int, num_rounds: int, report: Report
) -> None:
    name = size_name(page_bytes)
    samples, is_direct = measure(root / name, keys, page_bytes, num_bytes, num_rounds)
    report.settings["holder_reads"] = "direct" if is_direct else "buffered, page cache warm"
    size = num_bytes / 1e9
    shown = {}
    for side, found in samples.items():
        speeds = [size / seconds for seconds in found.seconds]
        shown[side] = (
            f"{side} {statistics.median(speeds):.2f} GB/s ({min(speeds):.2f} to {max(speeds):.2f})"
            f", {statistics.median(found.cpu) / size:.2f} CPU s/GB"
        )
        report.raw[f"{name}: {side}"] = vars(found)
    for figure, (ours, other) in FIGURES.items():
        ratio = quotients(samples[other].seconds, samples[ours].seconds)
        report.add(f"{figure}_{name}", ratio, beside=f"{shown[ours]}; {shown[other]}")
    for figure, (ours, other) in CPU_FIGURES.items():
        report.add(f"{figure}_{name}", quotients(samples[other].cpu, samples[ours].cpu))


def measure_resume(root: Path, num_rounds: int, report: Report) -> None:
    program = find_redis()
    if program is None:
        report.note("Servers were left out: there is no redis-server.")
        return
    model = resume.make_model(root / "model")
    with run_redis(program, root) as url:
        shared = ("--tier-index", url)
        found = resume.measure(model, root / "servers", num_rounds, tier="peer", shared=shared)
    resume.add("peer_resume_ttft_over_recompute", found, report)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer bytes and rounds")
    parser.add_argument(
        "--directory", type=Path, default=default_directory(), help="where the store goes"
    )
    parser.add_argument("--allow-tmpfs", action="store_true", help="even where that is memory")
    parser.add_argument("--no-pages", action="store_true", help="the servers only")
    parser.add_argument("--no-servers", action="store_true", help="the pages only")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    num_rounds = 5 if options.quick else 11
    num_bytes = (64 if options.quick else 256) << 20
    report = Report()
    try:
        with Workspace(
            options.directory, allow_tmpfs=options.allow_tmpfs, prefix="bench-peers-"
        ) as workspace:
            report.settings |= {
                "quick": options.quick,
                "rounds": num_rounds,
                "bytes_per_round": num_bytes,
                "filesystem": workspace.filesystem,
            }
            keys = workspace.root / "keys"
            make_keys(keys, [PEER])
            for page_bytes in () if options.no_pages else PAGE_SIZES:
                measure_size(workspace.root, keys, page_bytes, num_bytes, num_rounds, report)
            if not options.no_servers:
                measure_resume(workspace.root, 5 if options.quick else 9, report)
    except (DifferentBytesError, UnusableDirectoryError) as error:
        print(f"Nothing to compare: {error}", file=sys.stderr)
        return 1
    console = Console(width=170)
    machine = describe_machine()
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores; {report.settings['filesystem']}, reads "
        f"{report.settings.get('holder_reads', 'none')}; {num_bytes >> 20} MiB a round, "
        f"{num_rounds} rounds"
    )
    console.print(report.table())
    for note in report.notes:
        console.print(note)
    if options.json:
        result = {
            "machine": machine,
            "versions": describe_versions(),
            "settings": report.settings,
            "ratios": report.ratios,
            "raw": report.raw,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
