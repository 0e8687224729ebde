"""The store beside the raw device, at the same block size and depth, and the cost of checksums."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import JobKind
from storage_bench.figures import percentile, quotients, size_name
from storage_bench.host_memory import HostPages
from storage_bench.keys import make_keys
from storage_bench.own_engine import (
    NUM_READERS,
    NUM_WRITERS,
    PAGES_PER_RUN,
    empty,
    make_durable,
    make_runs,
    move_runs,
    open_engine,
    unverified_loads,
)
from storage_bench.setting import in_turn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from storage_bench.setting import Setting


MIB = 1 << 20
_MAX_RUN_BYTES = 128 * MIB
# Name of the pooled figure, what is divided by what, and what is wanted of it.
_FIGURES = (
    ("store_over_raw", "store", "raw_write"),
    ("load_over_raw", "load", "raw_read"),
    ("verified_over_unverified", "load", "unverified"),
)


def _sample_bytes(quick: bool) -> int:
    return (256 if quick else 1024) * MIB


def needed_bytes(quick: bool) -> int:
    return 4 * _sample_bytes(quick)


def num_files(quick: bool) -> int:
    return 100


def run(setting: Setting) -> None:
    megabytes = (1, 4) if setting.quick else (1, 2, 4, 8)
    sizes = [256 << 10, *(number * MIB for number in megabytes)]
    pooled: dict[str, list[float]] = {name: [] for name, _, _ in _FIGURES}
    for page_bytes in sizes:
        title = f"raw device, pages of {size_name(page_bytes)}"
        with (
            setting.workspace.folder("device") as folder,
            setting.steps(title, 5 * setting.num_samples) as step,
        ):
            rates = _measure(setting, folder, page_bytes, step)
        setting.report.raw[f"device_{size_name(page_bytes)}_bytes_per_s"] = rates
        for name, own, other in _FIGURES:
            values = quotients(rates[own], rates[other])
            large = page_bytes >= MIB
            if large:
                pooled[name] += values
            setting.report.add(
                f"{name}_{size_name(page_bytes)}",
                values,
                wanted=">= 0.95" if large or other == "unverified" else ">= 0.90",
                beside=" / ".join(
                    f"{side} {percentile(rates[side], 0.5) / 1e9:.2f} GB/s" for side in (own, other)
                ),
            )
    for name, values in pooled.items():
        setting.report.add(name, values, wanted=">= 0.95", beside="all pages of 1 MiB and more")
    setting.report.settings["device"] = {
        "sample_bytes": _sample_bytes(setting.quick),
        "pages_per_run": PAGES_PER_RUN,
        "max_run_bytes": _MAX_RUN_BYTES,
        "depth_write": NUM_WRITERS,
        "depth_read": NUM_READERS,
        "raw": setting.raw_device.name,
    }


def _measure(
    setting: Setting, folder: Path, page_bytes: int, step: Callable[[], None]
) -> dict[str, list[float]]:
    """Bytes per second of every sample and side."""
    total = _sample_bytes(setting.quick)
    pages_per_run = min(PAGES_PER_RUN, _MAX_RUN_BYTES // page_bytes)
    num_runs = total // (pages_per_run * page_bytes)
    num_pages = total // 2 // page_bytes
    source = HostPages(num_pages, page_bytes, seed=page_bytes)
    target = HostPages(num_pages, page_bytes)
    num_in_flight = num_pages // pages_per_run  # no buffer is in two jobs at once
    raw_file = folder / "raw"
    rates: dict[str, list[float]] = {
        side: [] for side in ("store", "raw_write", "load", "raw_read", "unverified")
    }
    engine = open_engine(folder / "store", 2 * total)
    try:
        for sample in range(setting.num_samples):
            empty(engine)
            keys = [
                make_keys(f"{page_bytes}/{sample}/{number}", pages_per_run)
                for number in range(num_runs)
            ]
            stores, loads = make_runs(keys, source), make_runs(keys, target)
            for side in in_turn(("store", "raw_write"), sample):
                setting.workspace.settle()
                if side == "raw_write":
                    rate = setting.raw_device.write(raw_file, total, page_bytes, NUM_WRITERS)
                else:
                    start = time.perf_counter()
                    move_runs(engine, JobKind.STORE, stores, num_in_flight)
                    make_durable(engine)
                    rate = total / (time.perf_counter() - start)
                rates[side].append(rate)
                step()
            for side in in_turn(("load", "raw_read", "unverified"), sample):
                target.poison()
                setting.workspace.settle()
                if side == "raw_read":
                    rate = setting.raw_device.read([raw_file], total, page_bytes, NUM_READERS)
                else:
                    with unverified_loads(side == "unverified"):
                        start = time.perf_counter()
                        move_runs(engine, JobKind.LOAD, loads, num_in_flight)
                        rate = total / (time.perf_counter() - start)
                    target.check_equal(0, source, 0, num_pages)
                rates[side].append(rate)
                step()
    finally:
        engine.close()
    return rates
