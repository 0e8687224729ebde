"""``verify`` of a URL: every page against its name, every record and pin."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from sglang_tiered.config import format_bytes
from sglang_tiered.storage.bucket.erased import all_records
from sglang_tiered.storage.bucket.names import Layout, PageName, page_checksum, parse_page
from sglang_tiered.storage.bucket.pins import unpack_pin
from sglang_tiered.storage.bucket.requests import Failure, RequestError
from sglang_tiered.tools.store.bucket import (
    open_bucket,
    print_namespaces,
    refuse_flags,
    requests_end,
)
from sglang_tiered.tools.store.report import MAX_LISTED
from sglang_tiered.tools.terminal import print_lines, write_json

if TYPE_CHECKING:
    import argparse

    from sglang_tiered.storage.bucket.directory import Listed
    from sglang_tiered.storage.bucket.requests import Requests

__all__ = ["run"]

_COUNTED = ("pages", "damaged_pages", "page_bytes", "pins", "gone_meanwhile")


class _Found:
    """What was found in one namespace, on one thread."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[dict[str, Any]] = []

    def problem(self, path: str, what: str) -> None:
        self.problems.append({"path": path, "problem": what})


def run(arguments: argparse.Namespace) -> int:
    refuse_flags(region=arguments.region)
    target = open_bucket(arguments.place)
    started = time.monotonic()
    namespaces: list[dict[str, Any]] = []
    with requests_end(target.url), ThreadPoolExecutor(arguments.jobs) as pool:
        records = _Found()
        for record in all_records(target.requests):
            if record.what is None:
                records.problem(record.path, "cannot be read: servers miss all that is older")
        for name in target.namespaces:
            found = _verify(target.requests, Layout(name), pool)
            counts = {key: found.counts[key] for key in _COUNTED}
            namespaces.append({"namespace": name.hex(), **counts, "problems": found.problems})
    seconds, nbytes = time.monotonic() - started, target.requests.bytes_in
    problems = [*records.problems, *(p for entry in namespaces for p in entry["problems"])]
    report: dict[str, Any] = {
        "url": target.url,
        "namespaces": namespaces,
        "total": {key: sum(entry[key] for entry in namespaces) for key in _COUNTED},
        "problems": problems,
        "bytes_read": nbytes,
        "seconds": seconds,
        "mb_per_s": nbytes / 1e6 / seconds if seconds else 0.0,
        "requests": target.requests.requests,
        "notes": target.notes,
        "ok": not problems,
    }
    if arguments.json:
        write_json(report)
    else:
        _show(report)
    return 0 if report["ok"] else 1


def _verify(requests: Requests, layout: Layout, pool: ThreadPoolExecutor) -> _Found:
    """Check page by page, as many at once as the pool has threads."""
    found = _Found()
    for chunk in requests.listing(layout.pages):
        named = [(each, name) for each in chunk if (name := parse_page(each.path)) is not None]
        found.counts["pages"] += len(named)
        found.counts["page_bytes"] += sum(name.length for _, name in named)
        checked = pool.map(lambda page: _verify_page(requests, layout, *page), named)
        for (each, _), wrong in zip(named, checked, strict=True):
            if wrong is None:
                found.counts["gone_meanwhile"] += 1
            elif wrong:
                found.counts["damaged_pages"] += 1
                found.problem(each.path, wrong)
    for chunk in requests.listing(layout.pins):
        for each in chunk:
            data = _get(requests, each)
            found.counts["pins"] += 1
            if data is not None and unpack_pin(bytes(data)) is None:
                found.problem(each.path, "does not verify: what it pinned may go")
    return found


def _get(requests: Requests, listed: Listed) -> memoryview | None:
    try:
        return requests.get(listed.path, max(listed.size, 1))
    except RequestError as error:
        if error.failure is Failure.BAD_RANGE:
            return memoryview(b"")
        if error.failure is not Failure.NOT_FOUND:
            raise
        return None


def _verify_page(requests: Requests, layout: Layout, listed: Listed, name: PageName) -> str | None:
    """Return what is wrong with a page; empty for nothing, None for one that is gone."""
    data = _get(requests, listed)
    if data is None:
        return None
    if len(data) != listed.size:
        return f"has {len(data)} bytes instead of {listed.size}"
    matches = page_checksum(name.stem(layout), (data,)) == name.checksum
    return "" if matches else "does not match the checksum in its name"


def _show(report: dict[str, Any]) -> None:
    print_namespaces(
        report,
        {
            "pages": lambda entry: f"{entry['pages']:,}",
            "bad pages": lambda entry: f"{entry['damaged_pages']:,}",
            "in the store": lambda entry: format_bytes(entry["page_bytes"]),
            "pins": lambda entry: f"{entry['pins']:,}",
        },
    )
    problems, total = report["problems"], report["total"]
    print_lines(["", *(f"damage: {p['path']}: {p['problem']}" for p in problems[:MAX_LISTED])])
    if len(problems) > MAX_LISTED:
        print_lines([f"damage: and {len(problems) - MAX_LISTED:,} more; --json lists all"])
    print_lines(f"note: {text}" for text in report["notes"])
    if total["gone_meanwhile"]:
        print_lines([f"note: {total['gone_meanwhile']:,} pages were removed while this ran"])
    speed = (
        f"read {format_bytes(report['bytes_read'])} in {report['seconds']:.1f} s and "
        f"{sum(report['requests'].values()):,} requests, {report['mb_per_s']:,.0f} MB/s"
    )
    if report["ok"]:
        print_lines([f"fine: all {total['pages']:,} pages verify; {speed}"])
    else:
        print_lines(
            [
                f"damaged: {total['damaged_pages']:,} of {total['pages']:,} pages, "
                f"{len(problems):,} findings; {speed}",
                "a server never serves a damaged page: it is a miss, and computed again",
            ]
        )
