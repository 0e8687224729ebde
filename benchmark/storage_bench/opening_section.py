"""A store with many pages: opening it, the first lookup, and the memory of its index."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_tiered.storage.base import JobKind
from storage_bench.figures import percentile, quotients
from storage_bench.host_memory import HostPages
from storage_bench.index_probe import CHAIN_PAGES, chain_keys
from storage_bench.own_engine import make_durable, make_runs, move_runs, open_engine
from storage_bench.setting import in_turn
from storage_bench.sides import make_hicache_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage_bench.setting import Setting


PAGE_BYTES = 4096
_NUM_SAMPLES = 5  # a million names take a while to scan
_BATCH = 128  # keys in one question of SGLang's controller
_RUNS_IN_FLIGHT = 16
# SGLang keeps no list of its files unless asked to, and no bound either; ours has both.
_VARIANTS: dict[str, dict[str, Any]] = {
    "hicache_file_default": {},
    "hicache_file_metadata_cache": {"enable_metadata_cache": True},
    "hicache_file_capped": {"max_size": 16 << 30},
}
_CHOSEN = "hicache_file_capped"


def _num_pages(quick: bool) -> int:
    return 50_000 if quick else 1_000_000


def _capacity_bytes(num_pages: int) -> int:
    return num_pages * PAGE_BYTES * 2 + (1 << 30)


def needed_bytes(quick: bool) -> int:
    # Every extent has a header; an inode of HiCacheFile's and its name take some hundred bytes.
    return _num_pages(quick) * (PAGE_BYTES + 2048) + (1 << 30)


def num_files(quick: bool) -> int:
    return _num_pages(quick) + 1000


def run(setting: Setting) -> None:
    num_pages = _num_pages(setting.quick)
    num_chains = num_pages // CHAIN_PAGES
    with setting.workspace.folder("opening") as folder:
        with setting.steps("opening: storing pages", num_chains) as step:
            _store_own(folder / "own", num_chains, step)
        with setting.steps("opening: making HiCacheFile's files", num_chains) as step:
            _make_files(folder / "hicache_file", num_chains, step)
        sides = ["own", *_VARIANTS]
        seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        with setting.steps("opening", _NUM_SAMPLES * len(sides)) as step:
            for sample in range(_NUM_SAMPLES):
                keys = chain_keys(sample * 37 % num_chains)
                for side in in_turn(sides, sample):
                    gc.collect()
                    setting.workspace.settle()
                    measure = _open_own if side == "own" else _open_hicache_file
                    seconds[side].append(measure(folder, num_pages, side, keys))
                    step()
        with setting.steps("opening: memory of the index", 1):
            probe = _probe_index(folder, num_pages)
    _report(setting, num_pages, seconds, probe)


def _store_own(folder: Path, num_chains: int, step: Callable[[], None]) -> None:
    memory = HostPages(_RUNS_IN_FLIGHT * CHAIN_PAGES, PAGE_BYTES, seed=1)
    engine = open_engine(folder, _capacity_bytes(num_chains * CHAIN_PAGES))
    try:
        for first in range(0, num_chains, _RUNS_IN_FLIGHT):
            numbers = range(first, min(first + _RUNS_IN_FLIGHT, num_chains))
            runs = make_runs([chain_keys(number) for number in numbers], memory)
            move_runs(engine, JobKind.STORE, runs, _RUNS_IN_FLIGHT)
            for _ in numbers:
                step()
        make_durable(engine)
    finally:
        engine.close()


def _make_files(folder: Path, num_chains: int, step: Callable[[], None]) -> None:
    """HiCacheFile's names and sizes. No figure here reads its pages, so they are holes: a
    million real ones take minutes to write and, on a disk that is trimmed, more to remove."""
    suffix = make_hicache_file(folder).config_suffix
    directory = os.open(folder, os.O_RDONLY)
    try:
        for number in range(num_chains):
            for key in chain_keys(number):
                name = f"{key.hex()}{suffix}.bin"
                fd = os.open(name, os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=directory)
                os.ftruncate(fd, PAGE_BYTES)
                os.close(fd)
            step()
    finally:
        os.close(directory)


def _open_own(
    folder: Path, num_pages: int, side: str, keys: tuple[bytes, ...]
) -> tuple[float, float]:
    start = time.perf_counter()
    engine = open_engine(folder / side, _capacity_bytes(num_pages))
    opened = time.perf_counter()
    num_hits = engine.lookup(keys).num_hits
    done = time.perf_counter()
    engine.close()
    _check_hits(side, num_hits, keys)
    return opened - start, done - opened


def _open_hicache_file(
    folder: Path, num_pages: int, side: str, keys: tuple[bytes, ...]
) -> tuple[float, float]:
    names = [key.hex() for key in keys]
    start = time.perf_counter()
    backend = make_hicache_file(folder / "hicache_file", **_VARIANTS[side])
    opened = time.perf_counter()
    num_hits = sum(
        backend.batch_exists(names[first : first + _BATCH])
        for first in range(0, len(names), _BATCH)
    )
    done = time.perf_counter()
    _check_hits(side, num_hits, keys)
    return opened - start, done - opened


def _check_hits(side: str, num_hits: int, keys: tuple[bytes, ...]) -> None:
    if num_hits != len(keys):
        raise RuntimeError(f"{side} finds {num_hits} of {len(keys)} pages")


def _probe_index(folder: Path, num_pages: int) -> dict[str, Any]:
    """In a process of its own: what it holds besides the index would drown it."""
    command = [sys.executable, "-m", "storage_bench.index_probe", str(folder / "own")]
    arguments = [str(folder / "empty"), str(num_pages), str(_capacity_bytes(num_pages))]
    result = subprocess.run(
        [*command, *arguments], cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, check=True
    )
    probe: dict[str, Any] = json.loads(result.stdout)
    return probe


def _report(
    setting: Setting,
    num_pages: int,
    seconds: dict[str, list[tuple[float, float]]],
    probe: dict[str, Any],
) -> None:
    report = setting.report
    totals = {side: [sum(pair) for pair in taken] for side, taken in seconds.items()}
    for side in _VARIANTS:
        values = quotients(totals[side], totals["own"])
        beside = " / ".join(
            f"{name} {percentile(totals[name], 0.5):.3f} s" for name in ("own", side)
        )
        report.add(f"open_speedup_{side}", values, beside=beside)
        if side == _CHOSEN:
            report.add("open_speedup_hicache_file", values, wanted=">= 10", beside=f"as {side}")
    report.add(
        "open_and_lookup_s", totals["own"], beside=f"{num_pages:,} pages, a chain of {CHAIN_PAGES}"
    )
    report.add(
        "index_bytes_per_page",
        [probe["index_bytes"] / num_pages],
        wanted="<= 128" if num_pages >= 1_000_000 else "",  # fixed costs weigh on fewer
        beside=f"growth of the process with {num_pages:,} pages",
    )
    lookups = [1e3 * number for number in probe["lookup_s"]]
    beside = f"{len(lookups)} chains of {CHAIN_PAGES} pages, all hits"
    report.add("lookup_1000_ms_p50", [percentile(lookups, 0.5)], wanted="< 1", beside=beside)
    report.add("lookup_1000_ms_p99", [percentile(lookups, 0.99)], beside=beside)
    report.raw["opening_seconds"] = seconds
    report.raw["index"] = probe
    report.settings["opening"] = {
        "num_pages": num_pages,
        "page_bytes": PAGE_BYTES,
        "chain_pages": CHAIN_PAGES,
        "samples": _NUM_SAMPLES,
        "hicache_file": "files of its names and sizes without data; " + ", ".join(_VARIANTS),
        "open_speedup_hicache_file": _CHOSEN,
    }
