"""Cold loads and durable stores of 64-page runs beside SGLang's ``file`` backend and LMCache."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from storage_bench.figures import percentile, quotients, size_name
from storage_bench.host_memory import HostPages
from storage_bench.lmcache_side import LMCACHE_KINDS, LMCacheError, LMCacheSide, lmcache_version
from storage_bench.own_engine import NUM_READERS, NUM_WRITERS, PAGES_PER_RUN
from storage_bench.setting import in_turn
from storage_bench.sides import HiCacheFileSide, OwnSide

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from storage_bench.setting import Setting
    from storage_bench.sides import Cost, Side


KIB, MIB = 1 << 10, 1 << 20
_SIZES = (32 * KIB, 256 * KIB, MIB, 8 * MIB)
_WANTED = {32 * KIB: ">= 3", 256 * KIB: ">= 1.5"}
_DIRECTIONS = ("store", "load")
_MAX_RUNS = 64
_NUM_SAMPLES = 5  # the quotients are far from one, and there are up to five sides
_CHOSEN = 256 * KIB  # the page size whose speedup goes without a size in its name


def _sample_bytes(quick: bool) -> int:
    return (64 if quick else 256) * MIB


def needed_bytes(quick: bool) -> int:
    return 8 * max(_sample_bytes(quick), PAGES_PER_RUN * _SIZES[-1]) + (2 << 30)


def num_files(quick: bool) -> int:
    return 4 * _MAX_RUNS * PAGES_PER_RUN


def run(setting: Setting) -> None:
    python = setting.lmcache_python
    if python is None:
        setting.report.note("LMCache was not measured: pass --lmcache-python.")
    else:
        try:
            setting.report.settings["lmcache"] = lmcache_version(python)
        except LMCacheError as error:
            setting.report.note(f"LMCache was not measured: {error}.")
            python = None
    for page_bytes in _SIZES:
        run_bytes = PAGES_PER_RUN * page_bytes
        num_runs = max(1, min(_MAX_RUNS, _sample_bytes(setting.quick) // run_bytes))
        num_bytes = num_runs * run_bytes
        source = HostPages(num_runs * PAGES_PER_RUN, page_bytes, seed=page_bytes)
        with setting.workspace.folder("peers") as folder, contextlib.ExitStack() as stack:
            sides = _open_sides(setting, folder, source, python, stack)
            title = f"peers, pages of {size_name(page_bytes)}"
            with setting.steps(title, 2 * len(sides) * _NUM_SAMPLES) as step:
                costs = _measure(setting, sides, source.num_pages, page_bytes, step)
        _report(setting, page_bytes, num_bytes, costs)
    setting.report.settings["peers"] = {
        "pages_per_run": PAGES_PER_RUN,
        "sample_bytes": _sample_bytes(setting.quick),
        "max_runs_per_sample": _MAX_RUNS,
        "samples": _NUM_SAMPLES,
        "num_readers": NUM_READERS,
        "num_writers": NUM_WRITERS,
        "hicache_file": "as by default: no cap, no metadata cache; batches of one run",
        "durable": "own sync(); the others fsync of their files, then of the folder",
    }


def _open_sides(
    setting: Setting,
    folder: Path,
    source: HostPages,
    python: Path | None,
    stack: contextlib.ExitStack,
) -> list[Side]:
    target = HostPages(PAGES_PER_RUN, source.page_bytes)
    sides: list[Side] = [
        OwnSide(folder / "own", source, target),
        HiCacheFileSide(folder / "hicache_file", source, target),
    ]
    for kind in LMCACHE_KINDS:
        if python is None:
            break
        try:
            sides.append(LMCacheSide(python, kind, folder / f"lmcache_{kind}", source))
        except LMCacheError as error:
            setting.report.note(f"Not measured, pages of {size_name(source.page_bytes)}: {error}.")
    for side in sides:
        stack.callback(side.close)
    return sides


def _measure(
    setting: Setting,
    sides: list[Side],
    num_pages: int,
    page_bytes: int,
    step: Callable[[], None],
) -> dict[str, dict[str, list[Cost]]]:
    """Per direction and side, the cost of each sample."""
    costs: dict[str, dict[str, list[Cost]]] = {
        direction: {side.name: [] for side in sides} for direction in _DIRECTIONS
    }

    def give_up(side: Side, error: LMCacheError) -> None:
        """A peer that breaks down midway takes no figure of the others with it."""
        setting.report.note(f"Not measured, pages of {size_name(page_bytes)}: {error}.")
        sides.remove(side)
        for by_side in costs.values():
            del by_side[side.name]

    for sample in range(_NUM_SAMPLES):
        for side in list(sides):
            try:
                side.forget(sample)
            except LMCacheError as error:
                give_up(side, error)
        for direction in _DIRECTIONS:
            for side in in_turn(sides, sample):
                setting.workspace.settle()
                if side.buffered:
                    setting.workspace.make_page_cache_resident(2 * num_pages, page_bytes)
                try:
                    cost = side.store() if direction == "store" else side.load()
                except LMCacheError as error:
                    give_up(side, error)
                else:
                    costs[direction][side.name].append(cost)
                step()
    return costs


def _report(
    setting: Setting, page_bytes: int, num_bytes: int, costs: dict[str, dict[str, list[Cost]]]
) -> None:
    report, size = setting.report, size_name(page_bytes)
    for direction, by_side in costs.items():
        report.raw[f"peers_{direction}_{size}"] = {
            side: [{"seconds": cost.seconds, "cpu_s": cost.cpu_s} for cost in taken]
            for side, taken in by_side.items()
        }
        total_s = {side: [cost.total_s for cost in taken] for side, taken in by_side.items()}
        rates = {
            side: f"{side} {num_bytes / percentile(taken, 0.5) / 1e9:.2f} GB/s"
            for side, taken in total_s.items()
        }
        peers = [side for side in by_side if side != "own"]
        for peer in peers:
            values = quotients(total_s[peer], total_s["own"])
            beside = f"{rates['own']} / {rates[peer]}"
            wanted = _WANTED.get(page_bytes, ">= 1") if peer == "hicache_file" else ""
            name = f"{direction}_speedup_{peer}"
            report.add(f"{name}_{size}", values, wanted=wanted, beside=beside)
            if page_bytes == _CHOSEN and peer == "hicache_file":
                report.add(name, values, wanted=wanted, beside=f"pages of {size}")
        cpu = {
            side: [cost.cpu_s / num_bytes * 1e9 for cost in taken]
            for side, taken in by_side.items()
        }
        for peer in peers:
            report.add(
                f"{direction}_cpu_{peer}_over_own_{size}",
                quotients(cpu[peer], cpu["own"]),
                wanted="> 1" if peer == "hicache_file" else "",
                beside=" / ".join(
                    f"{side} {percentile(cpu[side], 0.5):.2f} s/GB" for side in ("own", peer)
                ),
            )
        for side, taken in cpu.items():
            report.add(f"{direction}_cpu_s_per_gb_{side}_{size}", taken, in_table=False)
