"""``gc`` of a URL: one run of the collector over every namespace. Plans only, unless told to
delete."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_tiered.config import format_bytes
from sglang_tiered.flags import parse_bytes, parse_duration
from sglang_tiered.storage.object.collector import Collector, CollectorSettings
from sglang_tiered.tools.store.bucket import open_bucket, refuse_flags, requests_end
from sglang_tiered.tools.store.report import MAX_LISTED, age_text
from sglang_tiered.tools.terminal import print_lines, print_table, write_json

if TYPE_CHECKING:
    import argparse

    from sglang_tiered.storage.object.collector import CollectorReport

__all__ = ["run"]

_BUDGET = 100_000


def run(arguments: argparse.Namespace) -> int:
    refuse_flags(keep_namespace=arguments.keep_namespace)
    settings = CollectorSettings(
        ttl_s=None if arguments.ttl is None else parse_duration("--ttl", arguments.ttl),
        capacity_bytes=None
        if arguments.max_bytes is None
        else parse_bytes("--max-bytes", arguments.max_bytes, otherwise="leave it out for no cap"),
    )
    target = open_bucket(arguments.place)
    reports: dict[str, CollectorReport] = {}
    with requests_end(target.url):
        for name in target.namespaces:
            collector = Collector(
                target.client,
                name,
                settings,
                # Asking the store for its time would write to it.
                clock=None if arguments.delete else time.time,
            )
            reports[name.hex()] = collector.run_once(_BUDGET, delete=arguments.delete)
    report = {
        "url": target.url,
        "deleted": arguments.delete,
        "settings": msgspec.to_builtins(settings),
        "namespaces": [
            {"namespace": name, **msgspec.to_builtins(found)} for name, found in reports.items()
        ],
        "notes": target.notes,
    }
    if arguments.json:
        write_json(report)
    else:
        _show(report, settings)
    return 0


def _show(report: dict[str, Any], settings: CollectorSettings) -> None:
    print_lines([f"{report['url']}: object tier", ""])
    for entry in report["namespaces"]:
        print_lines(
            [
                f"{entry['namespace'][:16]}: {entry['num_objects']:,} objects, "
                f"{format_bytes(entry['object_bytes'])}; {entry['num_buried']:,} wait for their "
                f"removal, {entry['num_orphans']:,} have no manifest"
            ]
        )
        removals = entry["removals"]
        if not removals:
            continue
        print_table(
            ["what", "path", "why", "bytes"],
            [
                [
                    removal["kind"],
                    removal["path"].rpartition("/")[2],
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
    removals = [removal for entry in report["namespaces"] for removal in entry["removals"]]
    nbytes = format_bytes(sum(removal["nbytes"] for removal in removals))
    if not removals:
        print_lines(["nothing to give back"])
    elif not report["deleted"]:
        print_lines([f"{len(removals):,} could go, {nbytes}; nothing was deleted (--delete does)"])
    else:
        freed = sum(entry["removed_bytes"] for entry in report["namespaces"])
        done = sum(entry["num_removed"] for entry in report["namespaces"])
        buried = sum(entry["num_buried"] for entry in report["namespaces"])
        line = f"deleted {done:,}, {format_bytes(freed)} given back"
        if buried:
            line += (
                f"; {buried:,} are no longer found and go in {age_text(settings.grace_s)}, with "
                "the next gc"
            )
        print_lines([line])
