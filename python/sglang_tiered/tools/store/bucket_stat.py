"""``stat`` of a URL: what an object tier holds, by its listings alone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sglang_tiered.config import format_bytes
from sglang_tiered.storage.object.format import (
    PAGE_DTYPE,
    TAIL_BYTES,
    manifest_bytes,
    num_forgotten,
)
from sglang_tiered.storage.object.listings import IdFilter
from sglang_tiered.storage.object.names import Layout, parse_path
from sglang_tiered.storage.region.files import PAGE_SIZES_NAME
from sglang_tiered.storage.region.notes import read_note, read_page_sizes
from sglang_tiered.tools.store.bucket import open_bucket, requests_end
from sglang_tiered.tools.store.report import MAX_LISTED, age_text, number_text
from sglang_tiered.tools.store.target import resolve
from sglang_tiered.tools.terminal import print_lines, print_table, write_json

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from sglang_tiered.storage.object.client import ObjectClient
    from sglang_tiered.storage.region.notes import PageSize

__all__ = ["run"]

_SUMMED = (
    "objects",
    "unannounced_objects",
    "pages",
    "payload_bytes",
    "object_bytes",
    "manifest_bytes",
    "purges",
    "forgotten_pages",
    "pins",
    "waiting_for_removal",
    "foreign",
)


def run(arguments: argparse.Namespace) -> int:
    sizes = {} if arguments.tier_dir is None else _noted_sizes(arguments.tier_dir)
    target = open_bucket(arguments.place)
    with requests_end(target.url):
        namespaces = [_collect(target.client, Layout(name)) for name in target.namespaces]
    for entry in namespaces:
        entry["tokens"] = _num_tokens(entry, sizes.get(bytes.fromhex(entry["namespace"])))
    report = {
        "url": target.url,
        "namespaces": namespaces,
        "total": {
            **{key: sum(entry[key] for entry in namespaces) for key in _SUMMED},
            "oldest_age_s": max(_ages(namespaces, "oldest_age_s"), default=None),
            "newest_age_s": min(_ages(namespaces, "newest_age_s"), default=None),
        },
        "requests": target.client.requests,
        "notes": target.notes,
    }
    if arguments.json:
        write_json(report)
    else:
        _show(report)
    return 0


def _noted_sizes(directory: Path) -> dict[bytes, PageSize]:
    """Return what servers of that directory noted of their pages, by namespace. Raises
    ``StoreError``."""
    sizes: dict[bytes, PageSize] = {}
    for shard in resolve(directory).shards:
        sizes |= read_page_sizes(read_note(shard.path, PAGE_SIZES_NAME))
    return sizes


def _num_tokens(entry: dict[str, Any], size: PageSize | None) -> int | None:
    """Return the tokens of a namespace; None where nobody noted its pages, where they are stored
    encoded, or where some are of other pools, which a listing does not tell apart."""
    if size is None or entry["payload_bytes"] != entry["pages"] * size.nbytes:
        return None
    return int(entry["pages"]) * size.num_tokens // size.num_pools


def _ages(namespaces: list[dict[str, Any]], key: str) -> list[float]:
    return [entry[key] for entry in namespaces if entry[key] is not None]


def _collect(client: ObjectClient, layout: Layout) -> dict[str, Any]:
    """Derive pages and payload from the lengths of manifests, which the listing tells."""
    found: dict[str, Any] = dict.fromkeys(_SUMMED, 0)
    times: list[float] = []
    announced = IdFilter()
    tags = set()
    for chunk in client.listing(layout.manifests):
        for entry in chunk:
            object_id = parse_path(entry.path)
            if object_id is None:
                found["foreign"] += 1
                continue
            announced.add(str(object_id))
            tags.add(object_id.tenant_tag)
            found["manifest_bytes"] += entry.size
            found["pages"] += max(entry.size - manifest_bytes(0), 0) // PAGE_DTYPE.itemsize
        if chunk:
            changed = [entry.modified for entry in chunk]
            times = [min([*times, *changed]), max([*times, *changed])]
    for chunk in client.listing(layout.objects):
        for entry in chunk:
            object_id = parse_path(entry.path)
            if object_id is None:
                found["foreign"] += 1
                continue
            found["objects"] += 1
            found["object_bytes"] += entry.size
            found["unannounced_objects"] += str(object_id) not in announced
            if str(object_id) in announced:
                found["payload_bytes"] += entry.size - TAIL_BYTES
    # Every announced object ends with a copy of its manifest.
    found["payload_bytes"] = max(found["payload_bytes"] - found["manifest_bytes"], 0)
    for chunk in client.listing(layout.purges):
        found["purges"] += len(chunk)
        found["forgotten_pages"] += sum(num_forgotten(entry.size) for entry in chunk)
    found["pins"] = sum(len(chunk) for chunk in client.listing(layout.pins))
    graves = client.listing(f"{layout.folder}/graves")
    found["waiting_for_removal"] = sum(len(chunk) for chunk in graves)
    now = time.time()
    return {
        "namespace": layout.namespace.hex(),
        **found,
        "tenants": len(tags - {0}),
        "oldest_age_s": max(now - times[0], 0.0) if times else None,
        "newest_age_s": max(now - times[1], 0.0) if times else None,
    }


def _show(report: dict[str, Any]) -> None:
    print_lines([f"{report['url']}: object tier", ""])
    entries = list(report["namespaces"])
    shown = entries[:MAX_LISTED]
    if len(entries) != 1:
        shown.append({"namespace": "total", "tenants": None, "tokens": None, **report["total"]})
    ends = ("payload", "in the store", "tenants", "oldest", "newest")
    print_table(
        ["namespace", "objects", "pages", "tokens", *ends],
        [
            [
                entry["namespace"][:16],
                f"{entry['objects']:,}",
                f"{entry['pages']:,}",
                number_text(entry["tokens"]),
                format_bytes(entry["payload_bytes"]),
                format_bytes(entry["object_bytes"] + entry["manifest_bytes"]),
                number_text(entry["tenants"]),
                age_text(entry["oldest_age_s"]),
                age_text(entry["newest_age_s"]),
            ]
            for entry in shown
        ],
    )
    total = report["total"]
    lines = []
    if total["unannounced_objects"]:
        lines.append(
            f"note: {total['unannounced_objects']:,} objects have no manifest: being uploaded, "
            "waiting for their removal, or left by a writer that died"
        )
    if total["foreign"]:
        lines.append(
            f"note: {total['foreign']:,} names do not belong to the store and are left alone"
        )
    if total["pins"]:
        lines.append(f"note: {total['pins']:,} pins keep what they name from the cap and its age")
    if total["forgotten_pages"]:
        lines.append(f"note: {total['forgotten_pages']:,} pages are forgotten, and hidden if left")
    requests = sum(report["requests"].values())
    lines.append(f"note: this took {requests:,} requests")
    print_lines(["", *lines, *(f"note: {text}" for text in report["notes"])])
