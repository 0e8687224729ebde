"""``verify``: reads everything a store holds and checks it against its checksums."""

from __future__ import annotations

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
from sglang_tiered.tools.store.holder import Holder
from sglang_tiered.tools.store.report import (
    MAX_LISTED,
    describe,
    holder_json,
    problem_json,
    problem_text,
)
from sglang_tiered.tools.store.scan import Meter, ShardReader, check_regions
from sglang_tiered.tools.store.target import resolve
from sglang_tiered.tools.terminal import print_lines, print_table, write_json

if TYPE_CHECKING:
    import argparse
    from types import TracebackType

    from sglang_tiered.tools.store.inspection import RegionView

__all__ = ["run"]

_COUNTED = ("regions", "open_regions", "damaged_regions", "regions_gone_meanwhile")
_SUMMED = ("extents", "pages", "damaged_pages", "payload_bytes")


def run(arguments: argparse.Namespace) -> int:
    target = resolve(arguments.directory)
    check_regions(target, arguments.region)
    started = time.monotonic()
    shards = []
    with _Bar(arguments.progress) as bar:
        readers = []
        try:
            for shard in target.shards:
                reader = ShardReader(shard, arguments.region)
                readers.append(reader)
                bar.expect(reader.region_bytes())
            for reader in readers:
                shards.append(_verify(reader, arguments.jobs, bar))
        finally:
            for reader in readers:
                reader.device.release()
    seconds = time.monotonic() - started
    report: dict[str, Any] = {
        "directory": str(target.path),
        "kind": "tier" if target.is_tier else "shard",
        "format_version": target.manifest,
        "lock": holder_json(target.holder()),
        "shards": shards,
        "total": {key: sum(s[key] for s in shards) for key in (*_COUNTED, *_SUMMED)},
        "bytes_read": bar.bytes_read,
        "seconds": seconds,
        "mb_per_s": bar.bytes_read / 1e6 / seconds if seconds else 0.0,
        "notes": [*target.notes, *(note for shard in shards for note in shard.pop("notes"))],
        "ok": not any(shard["problems"] for shard in shards),
    }
    if arguments.json:
        write_json(report)
    else:
        print_lines(describe(target, Holder(**report["lock"]), shards))
        _show(report)
    return 0 if report["ok"] else 1


def _verify(reader: ShardReader, jobs: int, meter: Meter) -> dict[str, Any]:
    name = reader.shard.name
    counts: dict[str, int] = dict.fromkeys((*_COUNTED, *_SUMMED), 0)
    problems: list[dict[str, Any]] = []
    notes = []
    if reader.checkpoint.present and not reader.checkpoint.valid:
        notes.append(f"{name}: the checkpoint does not verify; it only speeds up the next start")
    for view in reader.views(full=True, jobs=jobs, meter=meter):
        found = [problem_json(name, view, problem) for problem in view.problems]
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
        "checkpoint": reader.checkpoint._asdict(),
        **counts,
        "problems": problems,
        "notes": notes,
    }


def _notes(shard: str, view: RegionView, holder: Holder) -> list[str]:
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


def _show(report: dict[str, Any]) -> None:
    columns = ["shard", "regions", "open", "damaged", "pages", "bad pages"]
    rows = []
    entries = list(report["shards"])
    if len(entries) != 1:
        entries.append({"name": "total", **report["total"]})
    for entry in entries:
        rows.append(
            [
                entry["name"],
                str(entry["regions"]),
                str(entry["open_regions"]),
                str(entry["damaged_regions"]),
                f"{entry['pages']:,}",
                f"{entry['damaged_pages']:,}",
                format_bytes(entry["payload_bytes"]),
            ]
        )
    print_table([*columns, "payload"], rows)
    print_lines([""])
    problems = [problem for shard in report["shards"] for problem in shard["problems"]]
    print_lines(f"damage: {problem_text(problem)}" for problem in problems[:MAX_LISTED])
    if len(problems) > MAX_LISTED:
        print_lines([f"damage: and {len(problems) - MAX_LISTED:,} more; --json lists all"])
    print_lines(f"note: {text}" for text in report["notes"])
    total = report["total"]
    speed = (
        f"read {format_bytes(report['bytes_read'])} in {report['seconds']:.1f} s, "
        f"{report['mb_per_s']:,.0f} MB/s"
    )
    if report["ok"]:
        print_lines([f"fine: all {total['pages']:,} pages verify; {speed}"])
    else:
        print_lines(
            [
                f"damaged: {total['damaged_regions']} of {total['regions']} regions, "
                f"{total['damaged_pages']:,} of {total['pages']:,} pages; {speed}",
                "a server never serves a damaged page: it is a miss, and computed again",
            ]
        )


class _Bar(Meter):
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
