"""``verify`` of a URL: every manifest, and every page against its checksum."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_tiered.config import format_bytes
from sglang_tiered.storage.object.failures import Failure, RequestError
from sglang_tiered.storage.object.format import (
    MAX_MANIFEST_BYTES,
    MAX_PURGE_BYTES,
    other_version,
    pack_manifest,
    pack_tail,
    page_checksum,
    unpack_manifest,
    unpack_purge,
)
from sglang_tiered.storage.object.names import Layout, parse_path
from sglang_tiered.storage.region.pinning.pins import MAX_PIN_BYTES
from sglang_tiered.storage.region.pinning.pins import unpack as unpack_pin
from sglang_tiered.tools.store.bucket import open_bucket, refuse_flags, requests_end
from sglang_tiered.tools.store.report import MAX_LISTED
from sglang_tiered.tools.terminal import print_lines, print_table, write_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from concurrent.futures import Future

    from sglang_tiered.storage.object.client import ObjectClient
    from sglang_tiered.storage.object.format import Manifest
    from sglang_tiered.storage.object.names import ObjectId

__all__ = ["run"]

_READ_BYTES = 8 << 20
_COUNTED = (
    "objects",
    "pages",
    "damaged_pages",
    "payload_bytes",
    "purges",
    "forgotten_pages",
    "pins",
    "gone_meanwhile",
)


@dataclass
class _Found:
    """Says what was found in one object, or in all of a namespace."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def problem(self, path: str, what: str, *, key: str | None = None) -> None:
        self.problems.append({"path": path, "key": key, "problem": what})

    def add(self, other: _Found) -> None:
        self.counts += other.counts
        self.problems += other.problems
        self.notes += other.notes


def run(arguments: argparse.Namespace) -> int:
    refuse_flags(region=arguments.region)
    target = open_bucket(arguments.place)
    started = time.monotonic()
    namespaces: list[dict[str, Any]] = []
    with requests_end(target.url), ThreadPoolExecutor(arguments.jobs) as pool:
        for name in target.namespaces:
            found = _verify(target.client, Layout(name), pool, arguments.jobs)
            namespaces.append(
                {
                    "namespace": name.hex(),
                    **{key: found.counts[key] for key in _COUNTED},
                    "problems": found.problems,
                    "notes": found.notes,
                }
            )
    seconds = time.monotonic() - started
    nbytes = target.client.bytes_in
    report: dict[str, Any] = {
        "url": target.url,
        "namespaces": namespaces,
        "total": {key: sum(entry[key] for entry in namespaces) for key in _COUNTED},
        "bytes_read": nbytes,
        "seconds": seconds,
        "mb_per_s": nbytes / 1e6 / seconds if seconds else 0.0,
        "requests": target.client.requests,
        "notes": [*target.notes, *(note for entry in namespaces for note in entry.pop("notes"))],
        "ok": not any(entry["problems"] for entry in namespaces),
    }
    if arguments.json:
        write_json(report)
    else:
        _show(report)
    return 0 if report["ok"] else 1


def _verify(client: ObjectClient, layout: Layout, pool: ThreadPoolExecutor, jobs: int) -> _Found:
    """At most twice as many objects under way as are checked at a time: a listing may be long."""
    found = _Found()
    under_way: set[Future[_Found]] = set()

    def settle(least: int) -> None:
        while len(under_way) > least:
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                under_way.discard(future)
                found.add(future.result())

    try:
        for object_id in _ids(client, layout.manifests):
            under_way.add(pool.submit(_verify_object, client, layout, object_id))
            settle(2 * jobs)
        settle(0)
    finally:
        for future in under_way:
            future.cancel()
    for purge_id in _ids(client, layout.purges):
        path = layout.purge(purge_id)
        data = _get(client, path, MAX_PURGE_BYTES)
        found.counts["purges"] += 1
        if data is None or other_version(data) is not None:
            continue
        purge = unpack_purge(data)
        if purge is None:
            found.problem(path, "does not verify: what it purged may be served again")
        else:
            found.counts["forgotten_pages"] += len(purge.keys)
    for pin_id in _ids(client, layout.pins):
        pin = _get(client, layout.pin(pin_id), MAX_PIN_BYTES)
        found.counts["pins"] += 1
        if pin is not None and unpack_pin(bytes(pin)) is None:
            found.problem(layout.pin(pin_id), "does not verify: what it pinned may go")
    return found


def _ids(client: ObjectClient, folder: str) -> Iterator[ObjectId]:
    for chunk in client.listing(folder):
        for entry in chunk:
            if (object_id := parse_path(entry.path)) is not None:
                yield object_id


def _get(client: ObjectClient, path: str, max_bytes: int = MAX_MANIFEST_BYTES) -> memoryview | None:
    try:
        return client.get(path, max_bytes)
    except RequestError as error:
        if error.failure is not Failure.NOT_FOUND:
            raise
        return None


def _verify_object(client: ObjectClient, layout: Layout, object_id: ObjectId) -> _Found:
    found = _Found()
    path, object_path = layout.manifest(object_id), layout.object(object_id)
    data = _get(client, path)
    if data is None:
        found.counts["gone_meanwhile"] += 1
        return found
    if (version := other_version(data)) is not None:
        found.notes.append(f"{path} is of format {version}: another version wrote it")
        return found
    found.counts["objects"] += 1
    manifest = unpack_manifest(data)
    if manifest is None:
        found.problem(path, "does not verify")
        return found
    if (manifest.namespace, manifest.object_id) != (layout.namespace, object_id):
        found.problem(path, "is that of another object")
        return found
    found.counts["pages"] += len(manifest.pages)
    found.counts["payload_bytes"] += manifest.payload_bytes
    try:
        nbytes = client.size(object_path)
        if nbytes != manifest.object_bytes:
            found.problem(object_path, f"has {nbytes} bytes instead of {manifest.object_bytes}")
        _verify_pages(client, object_path, manifest, found)
        start = manifest.payload_bytes
        end = bytes(client.get_range(object_path, start, manifest.object_bytes))
        if end != pack_manifest(manifest) + pack_tail(len(manifest.pages)):
            found.problem(object_path, "does not end with a copy of its manifest")
    except RequestError as error:
        if error.failure is Failure.NOT_FOUND:
            if _get(client, path) is None:
                found.counts["gone_meanwhile"] += 1
            else:
                found.problem(object_path, "is gone, and its manifest is not")
        elif error.failure is not Failure.BAD_RANGE:  # shorter than it should be, as was said
            raise
    return found


def _verify_pages(client: ObjectClient, path: str, manifest: Manifest, found: _Found) -> None:
    """Read an object in ranges of some pages, which bound the memory that this takes."""
    pages = manifest.pages
    first = 0
    while first < len(pages):
        start = int(pages["offset"][first])
        end, last = start, first
        while last < len(pages) and (last == first or end - start < _READ_BYTES):
            end = int(pages["offset"][last]) + int(pages["stored"][last])
            last += 1
        data = client.get_range(path, start, end)
        for row in pages[first:last]:
            at = int(row["offset"]) - start
            stored = data[at : at + int(row["stored"])]
            key = bytes(row["key"])
            whole = len(stored) == int(row["stored"])
            if not whole or page_checksum(manifest.namespace, key, (stored,)) != row["checksum"]:
                found.counts["damaged_pages"] += 1
                what = "does not match its checksum" if whole else "is not there in full"
                found.problem(path, f"page {key.hex()[:16]} {what}", key=key.hex())
        first = last


def _show(report: dict[str, Any]) -> None:
    print_lines([f"{report['url']}: object tier", ""])
    entries = list(report["namespaces"])
    if len(entries) != 1:
        entries.append({"namespace": "total", **report["total"]})
    print_table(
        ["namespace", "objects", "pages", "bad pages", "payload", "purges"],
        [
            [
                entry["namespace"][:16],
                f"{entry['objects']:,}",
                f"{entry['pages']:,}",
                f"{entry['damaged_pages']:,}",
                format_bytes(entry["payload_bytes"]),
                f"{entry['purges']:,}",
            ]
            for entry in entries
        ],
    )
    print_lines([""])
    problems = [problem for entry in report["namespaces"] for problem in entry["problems"]]
    print_lines(f"damage: {p['path']}: {p['problem']}" for p in problems[:MAX_LISTED])
    if len(problems) > MAX_LISTED:
        print_lines([f"damage: and {len(problems) - MAX_LISTED:,} more; --json lists all"])
    print_lines(f"note: {text}" for text in report["notes"])
    total = report["total"]
    if total["gone_meanwhile"]:
        print_lines([f"note: {total['gone_meanwhile']:,} objects were removed while this ran"])
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
