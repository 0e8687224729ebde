"""``gc`` of a URL: one run of the collector over every namespace, and what earlier formats left.
Plans only, unless told to delete."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_tiered.config import format_bytes
from sglang_tiered.flags import parse_bytes, parse_duration
from sglang_tiered.storage.bucket.collect import (
    Collector,
    CollectorReport,
    CollectorSettings,
    old_objects,
)
from sglang_tiered.storage.bucket.names import Layout
from sglang_tiered.tools.store.bucket import open_bucket, refuse_flags, requests_end
from sglang_tiered.tools.store.report import MAX_LISTED
from sglang_tiered.tools.terminal import print_lines, print_table, write_json

if TYPE_CHECKING:
    import argparse

    from sglang_tiered.storage.bucket.requests import Requests

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    refuse_flags(keep_namespace=arguments.keep_namespace)
    settings = CollectorSettings(
        ttl_s=None if arguments.ttl is None else parse_duration("--ttl", arguments.ttl),
        capacity_bytes=None
        if arguments.max_bytes is None
        else parse_bytes("--max-bytes", arguments.max_bytes, otherwise="leave it out for no cap"),
    )
    target = open_bucket(arguments.place)
    # It is no server: its marker must not make a namespace look used. So by this machine's clock.
    collector = Collector(target.requests, settings, clock=time.time)
    reports: dict[str, CollectorReport] = {}
    with requests_end(target.url):
        old = old_objects(target.requests, delete=arguments.delete)
        # Of the namespaces the one that was used last stays, however long ago that is.
        used = {name: _last_used(target.requests, name) for name in target.namespaces}
        for name in target.namespaces:
            reports[name.hex()] = collector.run_once(
                name,
                delete=arguments.delete,
                is_server=False,
                old_namespaces=name == max(used, key=lambda each: used[each]),
            )
    report = {
        "url": target.url,
        "deleted": arguments.delete,
        "settings": msgspec.to_builtins(settings),
        "namespaces": [
            {"namespace": name, **msgspec.to_builtins(found)} for name, found in reports.items()
        ],
        "old_format": msgspec.to_builtins(old),
        "notes": target.notes,
    }
    if arguments.json:
        write_json(report)
    else:
        _show(report)
    return 0


def _last_used(requests: Requests, namespace: bytes) -> float:
    return requests.modified(Layout(namespace).collected) or 0.0


def _show(report: dict[str, Any]) -> None:
    print_lines([f"{report['url']}: object tier", ""])
    print_lines(
        f"{entry['namespace'][:16]}: {entry['num_pages']:,} pages, "
        f"{format_bytes(entry['page_bytes'])}"
        for entry in report["namespaces"]
    )
    of_namespaces = [each for entry in report["namespaces"] for each in entry["removals"]]
    removals = [*of_namespaces, *report["old_format"]]
    if removals:
        print_table(
            ["what", "path", "why", "bytes"],
            [
                [
                    removal["kind"],
                    removal["path"].rpartition("/")[2][:48],
                    removal["reason"],
                    format_bytes(removal["nbytes"]),
                ]
                for removal in removals[:MAX_LISTED]
            ],
            left=3,
        )
    if len(removals) > MAX_LISTED:
        print_lines([f"and {len(removals) - MAX_LISTED:,} more; --json lists all"])
    print_lines([""])
    print_lines(f"note: {text}" for text in report["notes"])
    if not all(entry["is_complete"] for entry in report["namespaces"]):
        print_lines(["note: there is more than one run removes; run it again"])
    nbytes = format_bytes(sum(removal["nbytes"] for removal in removals))
    if not removals:
        print_lines(["nothing to give back"])
    elif not report["deleted"]:
        print_lines([f"{len(removals):,} could go, {nbytes}; nothing was deleted (--delete does)"])
    else:
        print_lines([f"deleted {len(removals):,}, {nbytes} given back"])
