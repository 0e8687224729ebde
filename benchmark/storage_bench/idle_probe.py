"""One process of the ``idle`` section: it stores conversations, or opens a store of them, and waits
to be killed.

    python -m storage_bench.idle_probe store FOLDER NUM_CONVERSATIONS
    python -m storage_bench.idle_probe open FOLDER NUM_CONVERSATIONS NAME

Prints one line of JSON once what it stored is durable. ``open`` measures and then stores one more
conversation, of that name, so that it is killed with a region that is not sealed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from sglang_tiered.config import MIN_REGION_BYTES
from sglang_tiered.storage.base import JobKind, Run
from storage_bench.keys import make_keys
from storage_bench.own_engine import make_durable, move_runs, open_engine

if TYPE_CHECKING:
    from sglang_tiered.storage.region.engine import RegionEngine


PAGE_BYTES = 4096
PAGES_EACH = 16
# The least a server takes: as many pages to a region as pages of 256 KiB have in one of 256 MiB.
REGION_BYTES = MIN_REGION_BYTES
_IN_FLIGHT = 64
_NUM_LOOKUPS = 5000


def capacity_bytes(num_conversations: int) -> int:
    """Room for all of them with their headers, and for what each restart leaves unused."""
    return 2 * num_conversations * PAGES_EACH * PAGE_BYTES + 64 * REGION_BYTES


def main() -> None:
    action, folder, number, *name = sys.argv[1:]
    num_conversations = int(number)
    figures: dict[str, Any] = {}
    if action == "store":
        engine = _open(Path(folder) / "store", num_conversations)
        chains = [_chain("idle", number) for number in range(num_conversations)]
    else:
        engine = _measure(Path(folder), num_conversations, figures)
        chains = [_chain(f"later/{name[0]}", 0)]
    _store(engine, chains)
    print(json.dumps(figures), flush=True)
    sys.stdin.read()  # until it is killed


def _open(path: Path, num_conversations: int) -> RegionEngine:
    return open_engine(path, capacity_bytes(num_conversations), REGION_BYTES)


def _chain(name: str, number: int) -> tuple[bytes, ...]:
    return make_keys(name, PAGES_EACH, number * PAGES_EACH)


def _store(engine: RegionEngine, chains: list[tuple[bytes, ...]]) -> None:
    memory = memoryview(mmap.mmap(-1, _IN_FLIGHT * PAGES_EACH * PAGE_BYTES))
    memory[:] = random.Random(0).randbytes(memory.nbytes)
    pages = [(memory[at : at + PAGE_BYTES],) for at in range(0, memory.nbytes, PAGE_BYTES)]
    runs = []
    for number, chain in enumerate(chains):
        at = number % _IN_FLIGHT * PAGES_EACH
        runs.append(Run(chain, tuple(pages[at : at + PAGES_EACH])))
    move_runs(engine, JobKind.STORE, runs, _IN_FLIGHT)
    make_durable(engine)


def _measure(folder: Path, num_conversations: int, figures: dict[str, Any]) -> RegionEngine:
    """Open the store, after an empty one, so that threads and code are not charged to the index,
    and look conversations up."""
    process = psutil.Process()
    _open(folder / "empty", num_conversations).close()
    gc.collect()
    before = process.memory_info().rss
    begun, begun_cpu = time.perf_counter(), time.process_time()
    engine = _open(folder / "store", num_conversations)
    figures["open_s"] = time.perf_counter() - begun
    figures["open_cpu_s"] = time.process_time() - begun_cpu
    gc.collect()
    figures["index_bytes"] = process.memory_info().rss - before
    ctypes.CDLL(None).malloc_trim(0)
    figures["index_bytes_trimmed"] = process.memory_info().rss - before
    figures["num_pages"] = engine.stats().num_pages
    source = random.Random(1)
    figures["lookup_s"] = []
    for _ in range(min(_NUM_LOOKUPS, 10 * num_conversations)):
        keys = _chain("idle", source.randrange(num_conversations))
        begun = time.perf_counter()
        num_hits = engine.lookup(keys).num_hits
        figures["lookup_s"].append(time.perf_counter() - begun)
        if num_hits != PAGES_EACH:
            raise RuntimeError(f"{num_hits} of {PAGES_EACH} pages of a conversation are found")
    return engine


if __name__ == "__main__":
    main()
