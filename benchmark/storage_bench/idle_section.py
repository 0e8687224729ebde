"""Idle conversations on one NVMe tier: memory of the index, lookups, and restarts.

Each sample is a process of its own, killed with ``kill -9`` while a region is open, as the one
before it was. ``restart`` reads the footers of regions; ``scan`` finds none of them valid, so it
reads and verifies every page.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_tiered.storage.region.format import BLOCK_BYTES
from storage_bench.figures import percentile
from storage_bench.idle_probe import PAGE_BYTES, PAGES_EACH, REGION_BYTES, capacity_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage_bench.setting import Setting


RESTARTS = ("restart", "scan")


@dataclass
class Idle:
    """What the processes said: ``opened`` by the kind of their restart."""

    num_conversations: int
    num_regions: int = 0
    opened: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {name: [] for name in RESTARTS}
    )

    @property
    def num_pages(self) -> int:
        return self.num_conversations * PAGES_EACH


def _num_conversations(quick: bool) -> int:
    return 10_000 if quick else 100_000


def needed_bytes(quick: bool) -> int:
    return capacity_bytes(_num_conversations(quick))


def num_files(quick: bool) -> int:
    return needed_bytes(quick) // REGION_BYTES + 1000


def run(setting: Setting) -> None:
    number, num_samples = _num_conversations(setting.quick), 3 if setting.quick else 5
    with (
        setting.workspace.folder("idle") as folder,
        setting.steps("idle conversations", 1 + num_samples * len(RESTARTS)) as step,
    ):
        found = measure(folder, number, num_samples, setting.workspace.settle, step)
    _report(setting, found)


def measure(
    folder: Path,
    num_conversations: int,
    num_samples: int,
    settle: Callable[[], None] = lambda: None,
    step: Callable[[], None] = lambda: None,
) -> Idle:
    """Store so many conversations below ``folder`` and open them again and again, each kind of
    restart in turn. Raises ``RuntimeError`` where a page is not found again."""
    found = Idle(num_conversations)
    store = folder / "store"
    _run_and_kill("store", str(folder), str(num_conversations))
    found.num_regions = len(list(store.glob("region-*.kv")))
    step()
    wanted = found.num_pages
    for sample in range(num_samples):
        for name in RESTARTS:
            regions = sorted(store.glob("region-*.kv"))
            if name != "restart":
                for region in regions:
                    _damage_trailer(region)
            settle()
            figures = _run_and_kill("open", str(folder), str(num_conversations), f"{name}/{sample}")
            if figures["num_pages"] != wanted:
                held = figures["num_pages"]
                raise RuntimeError(f"after a {name} {held} of {wanted} pages are found")
            wanted += PAGES_EACH  # each process stores one more conversation
            found.opened[name].append(figures)
            step()
    return found


def _run_and_kill(*arguments: str) -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, "-m", "storage_bench.idle_probe", *arguments],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
    finally:
        process.kill()
        process.communicate()
    if not line:
        raise RuntimeError(f"storage_bench.idle_probe {' '.join(arguments)} ended early")
    figures: dict[str, Any] = json.loads(line)
    return figures


def _damage_trailer(region: Path) -> None:
    with region.open("r+b") as file:
        file.seek(region.stat().st_size - BLOCK_BYTES)
        file.write(bytes(BLOCK_BYTES))


def _report(setting: Setting, found: Idle) -> None:
    report, all_opened = setting.report, [one for name in RESTARTS for one in found.opened[name]]
    by_footers = found.opened["restart"]
    what = f"{found.num_conversations:,} conversations, {found.num_pages:,} pages"
    sizes = [one["index_bytes"] for one in by_footers]
    report.add("idle_index_bytes_per_page", [n / found.num_pages for n in sizes], beside=what)
    report.add("idle_index_mb", [n / 1e6 for n in sizes], beside="growth of a fresh process")
    lookups = [1e6 * seconds for one in all_opened for seconds in one["lookup_s"]]
    beside = f"{len(lookups):,} chains of {PAGES_EACH} pages, all hits"
    report.add("idle_lookup_us_p50", [percentile(lookups, 0.5)], beside=beside)
    report.add("idle_lookup_us_p99", [percentile(lookups, 0.99)], beside=beside)
    beside = {
        "restart": f"after kill -9: {found.num_regions:,} regions, all but the open one by footer",
        "scan": "no footer verifies: every page is read and verified",
    }
    for name in RESTARTS:
        taken = [one["open_s"] for one in found.opened[name]]
        report.add(f"idle_{name}_s", taken, beside=beside[name])
    cpu = [1e3 * one["open_cpu_s"] / found.num_regions for one in by_footers]
    report.add("idle_restart_cpu_ms_per_region", cpu)
    for one in all_opened:
        one["lookup_us"] = [round(1e6 * seconds, 1) for seconds in one.pop("lookup_s")[:500]]
    report.raw["idle"] = found.opened
    report.settings["idle"] = {
        "num_conversations": found.num_conversations,
        "num_pages": found.num_pages,
        "page_bytes": PAGE_BYTES,
        "region_bytes": REGION_BYTES,
        "samples": len(by_footers),
    }
