"""``stat`` of a URL: what an object tier holds, by its listings alone."""

from __future__ import annotations

import array
import time
from typing import TYPE_CHECKING, Any

from sglang_tiered.config import format_bytes
from sglang_tiered.storage.bucket.erased import Erased, all_records
from sglang_tiered.storage.bucket.names import Layout, parse_page
from sglang_tiered.storage.region.files import PAGE_SIZES_NAME
from sglang_tiered.storage.region.notes import read_note, read_page_sizes
from sglang_tiered.tools.store.bucket import open_bucket, print_namespaces, requests_end
from sglang_tiered.tools.store.report import age_text, number_text
from sglang_tiered.tools.store.target import resolve
from sglang_tiered.tools.terminal import print_lines, write_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from sglang_tiered.storage.bucket.requests import Requests
    from sglang_tiered.storage.region.notes import PageSize

__all__ = ["run"]

_SUMMED = ("pages", "stored_bytes", "erased_pages", "pins", "foreign")


def run(arguments: argparse.Namespace) -> int:
    sizes = {} if arguments.tier_dir is None else _noted_sizes(arguments.tier_dir)
    target = open_bucket(arguments.place)
    with requests_end(target.url):
        records = all_records(target.requests)
        erased = Erased()
        for record in records:
            if record.what is not None:
                erased.add(record)
        namespaces = [
            _collect(target.requests, Layout(name), erased, sizes.get(name))
            for name in target.namespaces
        ]
    report = {
        "url": target.url,
        "namespaces": namespaces,
        "total": {
            **{key: sum(entry[key] for entry in namespaces) for key in _SUMMED},
            "oldest_age_s": max(_ages(namespaces, "oldest_age_s"), default=None),
            "newest_age_s": min(_ages(namespaces, "newest_age_s"), default=None),
        },
        "erasures": sum(each.what is None or not each.what.is_empty for each in records),
        "requests": target.requests.requests,
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


def _num_tokens(lengths: Sequence[int], size: PageSize | None) -> int | None:
    """Return the tokens of pages that are stored in these lengths; None where nobody noted that, or
    where they do not tell."""
    if size is None:
        return None
    in_memory = size.in_memory(lengths)
    if (in_memory < 0).any():
        return None
    return int((in_memory == size.nbytes).sum()) * size.num_tokens // size.num_pools


def _ages(namespaces: list[dict[str, Any]], key: str) -> list[float]:
    return [entry[key] for entry in namespaces if entry[key] is not None]


def _collect(
    requests: Requests, layout: Layout, erased: Erased, size: PageSize | None
) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(_SUMMED, 0)
    oldest, newest, tenants = float("inf"), 0.0, set()
    lengths = array.array("Q")
    for chunk in requests.listing(layout.pages):
        for path, nbytes, modified, _ in chunk:
            name = parse_page(path)
            if name is None:
                found["foreign"] += 1
                continue
            found["pages"] += 1
            lengths.append(name.length)
            found["stored_bytes"] += nbytes
            found["erased_pages"] += erased.kills(
                layout.namespace, name.tenant, name.key, name.stamp
            )
            tenants.add(name.tenant)
            oldest, newest = min(oldest, modified), max(newest, modified)
    found["pins"] = sum(len(chunk) for chunk in requests.listing(layout.pins))
    now = time.time()
    return {
        "namespace": layout.namespace.hex(),
        **found,
        "tokens": _num_tokens(lengths, size),
        "tenants": sum(any(tenant) for tenant in tenants),
        "oldest_age_s": max(now - oldest, 0.0) if tenants else None,
        "newest_age_s": max(now - newest, 0.0) if tenants else None,
    }


def _show(report: dict[str, Any]) -> None:
    print_namespaces(
        report,
        {
            "pages": lambda entry: f"{entry['pages']:,}",
            "tokens": lambda entry: number_text(entry.get("tokens")),
            "in the store": lambda entry: format_bytes(entry["stored_bytes"]),
            "tenants": lambda entry: number_text(entry.get("tenants")),
            "oldest": lambda entry: age_text(entry["oldest_age_s"]),
            "newest": lambda entry: age_text(entry["newest_age_s"]),
        },
    )
    total = report["total"]
    lines = {
        "names do not belong to the store and are left alone": total["foreign"],
        "pins keep what they name from the cap and its age": total["pins"],
        "erasures are remembered": report["erasures"],
        "pages are erased: no server finds them, and the next collector removes them": total[
            "erased_pages"
        ],
    }
    print_lines(["", *(f"note: {number:,} {text}" for text, number in lines.items() if number)])
    print_lines(f"note: {text}" for text in report["notes"])
    print_lines([f"note: this took {sum(report['requests'].values()):,} requests"])
