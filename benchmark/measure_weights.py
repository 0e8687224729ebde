"""What it costs to know weights by their bytes: a file is read and digested as a server does it.

The file is made for it, with random bytes, and read from the page cache, where a model that was
just loaded mostly is. Seconds are those of the processor, which neighbours on the machine do not
change much; what a disk adds is its own.

    python benchmark/measure_weights.py [--quick] [--directory DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from sglang_tiered.flags import GiB, MiB
from sglang_tiered.integration.identity.file_digests import FileDigests, see
from sglang_tiered.tools.machine import describe_machine, describe_versions

NUM_RUNS = 7
PIECE_BYTES = 64 * MiB


def make_file(path: Path, num_bytes: int) -> None:
    piece = os.urandom(PIECE_BYTES)
    with path.open("wb") as stream:
        for _ in range(num_bytes // PIECE_BYTES):
            stream.write(piece)


def seconds(read_digest: bool, path: Path, memory: Path) -> float:
    """Of the processor, for reading a file whole, and digesting it or not."""
    begun = time.process_time()
    if read_digest:
        digests = FileDigests(memory)
        assert digests.read([see(path)], threading.Event())
        assert digests.num_bytes_read == path.stat().st_size
    else:
        buffer = memoryview(bytearray(MiB))
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.process_time() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller file")
    parser.add_argument("--directory", type=Path, help="where to put the file and its digest")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    num_bytes = GiB // 4 if arguments.quick else 2 * GiB
    raw: dict[str, list[float]] = {"digest_s": [], "read_s": []}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        path = Path(name, "model.safetensors")
        make_file(path, num_bytes)
        seconds(False, path, Path(name))
        for run in range(NUM_RUNS):  # a directory each: nothing is remembered
            memory = Path(name, str(run))
            memory.mkdir()
            raw["digest_s"].append(seconds(True, path, memory))
            raw["read_s"].append(seconds(False, path, memory))
    ratios = [one / two for one, two in zip(raw["digest_s"], raw["read_s"], strict=True)]
    rate = num_bytes / statistics.median(raw["digest_s"])
    report = {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {"num_bytes": num_bytes, "page_cache": "warm"},
        "ratios": {
            "digest_over_read": {
                "value": statistics.median(ratios),
                "min": min(ratios),
                "max": max(ratios),
                "n": NUM_RUNS,
            }
        },
        "raw": {**raw, "digested_bytes_per_core_s": rate},
    }
    print(f"{rate / 1e9:.1f} GB read and digested in a second of one core")
    print(f"{statistics.median(ratios):.2f} times the seconds of reading alone")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
