"""``stat``: what a store holds, how full it is and who uses it. Reads no sealed payload."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_tiered.config import format_bytes
from sglang_tiered.errors import ConfigError
from sglang_tiered.storage.region.files import PAGE_SIZES_NAME
from sglang_tiered.storage.region.format import FORMAT_VERSION
from sglang_tiered.storage.region.notes import read_note, read_page_sizes
from sglang_tiered.tools.store.report import (
    MAX_LISTED,
    age_text,
    describe,
    finish,
    holder_json,
    listed,
    number_text,
    problem_json,
    problem_text,
    with_total,
)
from sglang_tiered.tools.store.scan import ShardReader, identities, totals
from sglang_tiered.tools.store.target import Holder, resolve
from sglang_tiered.tools.terminal import print_lines, print_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence

    from sglang_tiered.storage.region.erase_log import Erased
    from sglang_tiered.storage.region.notes import PageSize
    from sglang_tiered.tools.store.scan import ScannedRegion
    from sglang_tiered.tools.store.target import Shard, StoreTarget

__all__ = ["run"]

_COUNTED = (
    *("pages", "superseded_pages", "purged_pages"),
    *("payload_bytes", "physical_bytes"),
)
_STATES = ("sealed", "open", "damaged", "other_format")
_UNTOLD = {"page_bytes": None, "tokens": None}


def run(arguments: argparse.Namespace) -> int:
    if arguments.tier_dir is not None:
        raise ConfigError("--tier-dir is for a URL, not for a directory.")
    target = resolve(arguments.directory)
    report = _collect(target, arguments.jobs)
    return finish(arguments, report, lambda report: _show(target, report))


def _collect(target: StoreTarget, jobs: int) -> dict[str, Any]:
    shards = [_collect_shard(shard, jobs) for shard in target.shards]
    total: dict[str, Any] = {
        "regions": {key: sum(s["regions"][key] for s in shards) for key in ("all", *_STATES)},
        **{key: sum(shard[key] for shard in shards) for key in _COUNTED},
    }
    total["tokens"] = _total_tokens(shards)
    total["utilisation"] = _share(total["payload_bytes"], total["physical_bytes"])
    ages = [s[key] for s in shards for key in ("oldest_region_age_s", "newest_region_age_s")]
    known = [age for age in ages if age is not None]
    total["oldest_region_age_s"] = max(known, default=None)
    total["newest_region_age_s"] = min(known, default=None)
    for field in ("namespace", "tenant"):
        sums: dict[str, dict[str, Any]] = {}
        for shard in shards:
            for entry in shard[field + "s"]:
                name = entry[field]
                sum_ = sums.setdefault(name, {field: name, "pages": 0, "payload_bytes": 0})
                sum_["pages"] += entry["pages"]
                sum_["payload_bytes"] += entry["payload_bytes"]
                if field == "namespace":
                    sum_["tokens"] = _total_tokens(shards, name)
                    before, added = sum_.get("page_bytes", 0), entry["page_bytes"]
                    sum_["page_bytes"] = None if None in (before, added) else before + added
        total[field + "s"] = sorted(sums.values(), key=lambda e: -e["payload_bytes"])
    return {
        "directory": str(target.path),
        "kind": "tier" if target.is_tier else "shard",
        "format_version": target.manifest,
        "lock": holder_json(target.holder()),
        "shards": shards,
        "total": total,
        "notes": list(target.notes),
        "ok": not any(shard["problems"] for shard in shards),
    }


def _collect_shard(shard: Shard, jobs: int) -> dict[str, Any]:
    with ShardReader(shard) as reader:
        views = list(reader.views(full=False, jobs=jobs))
        holder, num_gone, erased, pins = reader.holder, reader.num_gone, reader.erased, reader.pins
        sizes = read_page_sizes(read_note(shard.path, PAGE_SIZES_NAME))
    told = _told_of(views, erased, sizes)
    tokens = [each["tokens"] for each in told.values()]
    now = time.time_ns()
    ages = [max(now - v.header.created_ns, 0) / 1e9 for v in views if v.header is not None]
    states = [view.state.replace(" ", "_") for view in views]
    pages = np.concatenate([identities(view) for view in views] or [np.zeros(0, "V64")])
    payload = sum(view.payload_bytes for view in views)
    physical = sum(view.file_bytes for view in views)
    versions = sorted(
        {view.version or FORMAT_VERSION for view in views if view.header or view.version}
    )
    return {
        "name": shard.name,
        "lock": holder_json(holder),
        "regions": {"all": len(views), **{state: states.count(state) for state in _STATES}},
        "regions_gone_meanwhile": num_gone,
        "format_versions": versions,
        "pages": len(pages),
        "superseded_pages": len(pages) - len(np.unique(pages)),
        "purged_pages": sum(int(erased.dead_pages(v.sequence, v.contents).sum()) for v in views),
        "payload_bytes": payload,
        "physical_bytes": physical,
        "tokens": sum(tokens) if tokens else None,
        "utilisation": _share(payload, physical),
        "oldest_region_age_s": max(ages, default=None),
        "newest_region_age_s": min(ages, default=None),
        "erasures_damaged": erased.damaged,
        "pins": {
            "valid": len(pins.pins),
            "pages": len({key for pin in pins.pins for key in pin.keys}),
            "damaged": len(pins.damaged),
            "newer": len(pins.newer),
            "unread": len(pins.unread),
        },
        **{
            field + "s": [
                {field: value.hex(), "pages": number, "payload_bytes": nbytes}
                | ((_UNTOLD | told.get(value, {})) if field == "namespace" else {})
                for value, (number, nbytes) in sorted(
                    totals(views, field).items(), key=lambda item: -item[1][1]
                )
            ]
            for field in ("namespace", "tenant")
        },
        "open_regions": [
            {"file": v.name, "log_bytes": v.tail, "unverified_bytes": v.torn_bytes}
            for v in views
            if v.state == "open"
        ],
        "problems": [problem_json(shard.name, p, v) for v in views for p in v.problems],
    }


def _told_of(
    views: Sequence[ScannedRegion], erased: Erased, sizes: Mapping[bytes, PageSize]
) -> dict[bytes, dict[str, int]]:
    """Return what the noted sizes of pages tell of namespaces: the bytes in memory of all pages,
    and the tokens that a lookup can hit. Left out is one where the lengths of pages do not tell."""
    keys: dict[bytes, list[Any]] = {namespace: [] for namespace in sizes}
    told = dict.fromkeys(sizes, 0)
    for view in views:
        contents = view.contents
        alive = ~erased.dead_pages(view.sequence, contents)
        for namespace, size in sizes.items():
            ours = np.repeat(contents.of_namespace(namespace), contents.extents["num_pages"])
            if namespace not in told or not ours.any():
                continue
            in_memory = size.in_memory(contents.pages["length"][ours])
            if in_memory.min() < 0:
                del told[namespace]
                continue
            told[namespace] += int(in_memory.sum())
            keys[namespace].append(
                contents.pages["key"][ours][alive[ours] & (in_memory == size.nbytes)]
            )
    found = {}
    for namespace, page_bytes in told.items():
        if keys[namespace]:
            size, num_pages = sizes[namespace], len(np.unique(np.concatenate(keys[namespace])))
            tokens = num_pages * size.num_tokens // size.num_pools
            found[namespace] = {"page_bytes": page_bytes, "tokens": tokens}
    return found


def _total_tokens(shards: Iterable[dict[str, Any]], namespace: str | None = None) -> int | None:
    """Add up the tokens of shards, of one namespace or all; None where no shard knows. Ranks of one
    replica hold parts of the same tokens, which count once."""
    by_replica: dict[str, int] = {}
    for shard in shards:
        entries = [e for e in shard["namespaces"] if namespace in (None, e["namespace"])]
        known = [entry["tokens"] for entry in entries if entry["tokens"] is not None]
        if known:
            replica = shard["name"].partition("-dp")[2]
            by_replica[replica] = max(by_replica.get(replica, 0), sum(known))
    return sum(by_replica.values()) if by_replica else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _show(target: StoreTarget, report: dict[str, Any]) -> None:
    print_lines(describe(target, Holder(**report["lock"]), report["shards"]))
    entries = with_total(report["shards"], report["total"])
    print_table(
        ["shard", "regions", "sealed", "open", "damaged", "oldest", "newest"],
        [
            [
                entry["name"],
                *(str(entry["regions"][key]) for key in ("all", "sealed", "open", "damaged")),
                age_text(entry["oldest_region_age_s"]),
                age_text(entry["newest_region_age_s"]),
            ]
            for entry in entries
        ],
    )
    print_lines([""])
    print_table(
        [
            *("shard", "pages", "tokens", "superseded", "purged"),
            *("payload", "on disk", "used"),
        ],
        [
            [
                entry["name"],
                f"{entry['pages']:,}",
                number_text(entry["tokens"]),
                f"{entry['superseded_pages']:,}",
                f"{entry['purged_pages']:,}",
                format_bytes(entry["payload_bytes"]),
                format_bytes(entry["physical_bytes"]),
                "-" if entry["utilisation"] is None else f"{entry['utilisation']:.1%}",
            ]
            for entry in entries
        ],
    )
    for field in ("namespace", "tenant"):
        entries = report["total"][field + "s"]
        if field == "tenant" and not any(int(entry[field], 16) for entry in entries):
            continue  # tenants have no names here
        if entries:
            print_lines([""])
            columns = [field, "pages", "payload"]
            if field == "namespace":
                columns += ["tokens", "in memory", "ratio"]
            rows = [_row(entry, field)[: len(columns)] for entry in entries[:MAX_LISTED]]
            print_table(columns, rows)
    problems = [problem_text(each) for shard in report["shards"] for each in shard["problems"]]
    if problems:
        print_lines(["", f"damage ({len(problems)}; verify also checks every page):"])
        print_lines(listed(problems, "  "))
    print_lines(f"note: {text}" for text in _notes(report))


def _row(entry: dict[str, Any], field: str) -> list[str]:
    page_bytes, payload = entry.get("page_bytes"), entry["payload_bytes"]
    return [
        entry[field][:16] if int(entry[field], 16) else "none",
        f"{entry['pages']:,}",
        format_bytes(payload),
        number_text(entry.get("tokens")),
        "-" if page_bytes is None else format_bytes(page_bytes),
        "-" if page_bytes is None else f"{_share(page_bytes, payload) or 1:.2f}",
    ]


def _notes(report: dict[str, Any]) -> list[str]:
    notes = list(report["notes"])
    for shard in report["shards"]:
        versions = [str(v) for v in shard["format_versions"] if v != FORMAT_VERSION]
        others = f"regions of format {', '.join(versions)}, not {FORMAT_VERSION}"
        pins = shard["pins"]
        numbers = {
            others: shard["regions"]["other_format"],
            f"pins name {pins['pages']:,} pages": pins["valid"],
            "file of erasures does not verify; the next start removes all pages": int(
                shard["erasures_damaged"]
            ),
            "pins do not verify; the next start removes them": pins["damaged"],
            "pins are of a newer version": pins["newer"],
            "pins cannot be read; check the disk": pins["unread"],
            "regions were reclaimed while this ran": shard["regions_gone_meanwhile"],
        }
        notes += [f"{shard['name']}: {number} {text}" for text, number in numbers.items() if number]
    return notes
