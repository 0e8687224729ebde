"""``verify``: reads everything a store holds and checks it against its checksums."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from sglang_tiered.config import format_bytes
from sglang_tiered.storage.region.format import FORMAT_VERSION
from sglang_tiered.tools.store.report import (
    describe,
    finish,
    holder_json,
    listed,
    problem_json,
    problem_text,
    speed,
    verdict,
    with_total,
)
from sglang_tiered.tools.store.scan import ByteMeter, ShardReader, check_regions
from sglang_tiered.tools.store.target import Holder, resolve
from sglang_tiered.tools.terminal import print_lines, print_table

if TYPE_CHECKING:
    import argparse
    from types import TracebackType

    from sglang_tiered.tools.store.scan import ScannedRegion
    from sglang_tiered.tools.store.target import StoreTarget

__all__ = ["run"]

_COUNTED = ("regions", "open_regions", "damaged_regions", "regions_gone_meanwhile")
_SUMMED = ("extents", "pages", "damaged_pages", "payload_bytes")


def run(arguments: argparse.Namespace) -> int:
    target = resolve(arguments.directory)
    check_regions(target, arguments.region)
    started = time.monotonic()
    with _Bar(arguments.progress) as bar, contextlib.ExitStack() as opened:
        readers = [
            opened.enter_context(ShardReader(shard, arguments.region)) for shard in target.shards
        ]
        bar.expect(sum(reader.region_bytes() for reader in readers))
        shards = [_verify(reader, arguments.jobs, bar) for reader in readers]
    report: dict[str, Any] = {
        "directory": str(target.path),
        "kind": "tier" if target.is_tier else "shard",
        "format_version": target.manifest,
        "lock": holder_json(target.holder()),
        "shards": shards,
        "total": {key: sum(s[key] for s in shards) for key in (*_COUNTED, *_SUMMED)},
        **speed(bar.bytes_read, time.monotonic() - started),
        "notes": [*target.notes, *(note for shard in shards for note in shard.pop("notes"))],
        "ok": not any(shard["problems"] for shard in shards),
    }
    return finish(arguments, report, lambda report: _show(target, report))


def _verify(reader: ShardReader, jobs: int, meter: ByteMeter) -> dict[str, Any]:
    name = reader.shard.name
    counts: dict[str, int] = dict.fromkeys((*_COUNTED, *_SUMMED), 0)
    problems = [problem_json(name, found, None, file) for file, found in reader.problems()]
    notes = []
    for view in reader.views(full=True, jobs=jobs, meter=meter):
        found = [problem_json(name, problem, view) for problem in view.problems]
        problems += found
        counts["regions"] += 1
        counts["open_regions"] += view.state == "open"
        counts["damaged_regions"] += view.state == "damaged"
        counts["extents"] += len(view.contents.extents)
        counts["pages"] += len(view.contents.pages)
        counts["damaged_pages"] += sum(problem["part"] == "page" for problem in found)
        counts["payload_bytes"] += view.payload_bytes
        notes += _notes(name, view, reader.holder)
    counts["regions_gone_meanwhile"] = reader.num_gone
    if reader.num_gone:
        notes.append(f"{name}: {reader.num_gone} regions were reclaimed while this ran")
    return {
        "name": name,
        "lock": holder_json(reader.holder),
        **counts,
        "problems": problems,
        "notes": notes,
    }


def _notes(shard: str, view: ScannedRegion, holder: Holder) -> list[str]:
    where = f"{shard}/{view.name}"
    if view.version is not None:
        fate = "a newer version wrote it" if view.version > FORMAT_VERSION else "it is not read"
        return [f"{where} is of format {view.version}, not {FORMAT_VERSION}: {fate}"]
    if view.state != "open":
        return []
    if holder.may_write:
        return [f"{where} is open: the server writes to it, {format_bytes(view.tail)} so far"]
    text = f"{where} was left open, as a crash leaves it; the next server start seals it"
    if view.torn_bytes:
        text += (
            f" and drops what lies behind offset {view.tail}, which was being written "
            "and does not verify"
        )
    return [text]


def _show(target: StoreTarget, report: dict[str, Any]) -> None:
    print_lines(describe(target, Holder(**report["lock"]), report["shards"]))
    print_table(
        ["shard", "regions", "open", "damaged", "pages", "bad pages", "payload"],
        [
            [
                entry["name"],
                str(entry["regions"]),
                str(entry["open_regions"]),
                str(entry["damaged_regions"]),
                f"{entry['pages']:,}",
                f"{entry['damaged_pages']:,}",
                format_bytes(entry["payload_bytes"]),
            ]
            for entry in with_total(report["shards"], report["total"])
        ],
    )
    print_lines([""])
    problems = [problem_text(each) for shard in report["shards"] for each in shard["problems"]]
    print_lines(listed(problems, "damage: "))
    print_lines(f"note: {text}" for text in report["notes"])
    total = report["total"]
    others = sum(each["region"] is None for shard in report["shards"] for each in shard["problems"])
    damage = (
        f"{total['damaged_regions']} of {total['regions']} regions, "
        f"{total['damaged_pages']:,} of {total['pages']:,} pages"
        f"{f', {others} other files' if others else ''}"
    )
    print_lines(verdict(report, damage))


class _Bar(ByteMeter):
    """Counts bytes and shows them on stderr. The unused end of a region, which is not read, is
    subtracted from the total."""

    def __init__(self, wanted: bool | None) -> None:
        super().__init__()
        self._expected = 0
        self._progress: Progress | None = None
        console = Console(stderr=True, force_terminal=wanted)
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("verifying"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> _Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def expect(self, nbytes: int) -> None:
        self._expected += nbytes
        self._update()

    def read(self, nbytes: int) -> None:
        super().read(nbytes)
        self._update()

    def skip(self, nbytes: int) -> None:
        with self._lock:
            self._expected -= nbytes
        self._update()

    def _update(self) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=self.bytes_read, total=self._expected)
