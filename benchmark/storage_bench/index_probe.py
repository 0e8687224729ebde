"""How much a process grows by opening a full store, and how long a lookup in it takes.

    python -m storage_bench.index_probe FULL EMPTY NUM_PAGES CAPACITY_BYTES

prints JSON. ``EMPTY`` is opened first, so that threads and code are not charged to the index.
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import sys
import time
from pathlib import Path

import psutil

from storage_bench.keys import make_keys
from storage_bench.own_engine import open_engine

CHAIN_PAGES = 1000
_NUM_LOOKUPS = 500


def chain_keys(number: int) -> tuple[bytes, ...]:
    return make_keys("opening", CHAIN_PAGES, number * CHAIN_PAGES)


def main() -> None:
    full, empty, num_pages, capacity_bytes = sys.argv[1:]
    process = psutil.Process()
    open_engine(Path(empty), int(capacity_bytes)).close()
    gc.collect()
    before = process.memory_info().rss
    engine = open_engine(Path(full), int(capacity_bytes))
    gc.collect()
    after = process.memory_info().rss
    ctypes.CDLL(None).malloc_trim(0)
    trimmed = process.memory_info().rss
    held = engine.stats().num_pages
    assert held == int(num_pages), f"{held} pages of {num_pages}"
    seconds = []
    source = random.Random(0)
    for _ in range(_NUM_LOOKUPS):
        keys = chain_keys(source.randrange(int(num_pages) // CHAIN_PAGES))
        start = time.perf_counter()
        num_hits = engine.lookup(keys).num_hits
        seconds.append(time.perf_counter() - start)
        assert num_hits == CHAIN_PAGES
    engine.close()
    figures = {
        "index_bytes": after - before,
        "index_bytes_trimmed": trimmed - before,
        "process_bytes_before": before,
        "lookup_s": seconds,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
