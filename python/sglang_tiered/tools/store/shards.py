"""``stat`` and ``verify`` of a directory: what it holds, how full it is and who uses it. The first
reads no sealed payload; the second reads everything, and checks it against its checksums."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress, TransferSpeedColumn

from sglang_tiered.config import format_bytes
from sglang_tiered.errors import ConfigError
from sglang_tiered.storage.region.files import PAGE_SIZES_NAME
from sglang_tiered.storage.region.format import FORMAT_VERSION
from sglang_tiered.storage.region.notes import read_note, read_page_sizes
from sglang_tiered.tools.store.report import (
    age,
    digest,
    finish,
    number,
    print_damage,
    print_entries,
    print_verdict,
    problem_json,
    problem_text,
    share,
    size,
    speed,
)
from sglang_tiered.tools.store.scan import open_shards
from sglang_tiered.tools.store.target import Holder, find_holder, resolve
from sglang_tiered.tools.terminal import print_lines

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from sglang_tiered.tools.store.scan import ScannedRegion, ShardReader
    from sglang_tiered.tools.store.target import StoreTarget

__all__ = ["run"]

_STATES = ("sealed", "open", "damaged", "other_format")
_SUMMED = (
    *("regions", *(f"{state}_regions" for state in _STATES), "regions_gone_meanwhile"),
    *("extents", "pages", "superseded_pages", "purged_pages", "damaged_pages"),
    *("payload_bytes", "physical_bytes"),
)
_REGION_COLUMNS = {
    "regions": ("regions", number),
    **{state: (f"{state}_regions", number) for state in _STATES[:3]},
    "oldest": ("oldest_region_age_s", age),
    "newest": ("newest_region_age_s", age),
}
_PAGE_COLUMNS = {
    "pages": ("pages", number),
    "tokens": ("tokens", number),
    "superseded": ("superseded_pages", number),
    "purged": ("purged_pages", number),
    "payload": ("payload_bytes", size),
    "on disk": ("physical_bytes", size),
    "used": ("utilisation", share),
}
_OF_TENANT = {"pages": ("pages", number), "payload": ("payload_bytes", size)}
_OF_NAMESPACE = {
    **_OF_TENANT,
    "tokens": ("tokens", number),
    "ratio": ("ratio", lambda value: "-" if value is None else f"{value:.2f}"),
}


def run(arguments: argparse.Namespace) -> int:
    is_full = arguments.command == "verify"
    if not is_full and arguments.tier_dir is not None:
        raise ConfigError("--tier-dir is for a URL, not for a directory.")
    target = resolve(arguments.directory)
    readers = open_shards(target, arguments.region)
    started, bytes_read = time.monotonic(), 0
    shards, told = [], []
    counted: dict[str, dict[str, dict[str, Any]]] = {"namespace": {}, "tenant": {}}
    with _bar(arguments.progress if is_full else False) as bar:
        task = bar.add_task("verifying", total=sum(reader.region_bytes() for reader in readers))
        for reader in readers:
            views = []  # of one shard at a time: they hold every page's key
            for view in reader.views(full=is_full, jobs=arguments.jobs):
                bar.advance(task, view.file_bytes)
                bytes_read += view.bytes_read
                views.append(view)
            told.append(_told_of(reader, views))
            shards.append(_collect(reader, views, told[-1]))
            for field, entries in counted.items():
                _count(views, field, entries)
    total = {key: sum(shard[key] for shard in shards) for key in _SUMMED}
    ages = [shard[f"{end}_region_age_s"] for shard in shards for end in ("oldest", "newest")]
    total |= _figures(total, [age for age in ages if age is not None])
    total["tokens"] = _sum_tokens(shards, [shard["tokens"] for shard in shards])
    for field, entries in counted.items():
        by_size = sorted(entries.values(), key=lambda entry: -entry["payload_bytes"])
        total[field + "s"] = by_size
    for entry in total["namespaces"]:
        ours = [each.get(entry["namespace"]) for each in told]
        known = [each for each in ours if each is not None]
        stored = sum(each.stored_bytes for each in known)
        entry["ratio"] = sum(each.page_bytes for each in known) / stored if known else None
        entry["tokens"] = _sum_tokens(shards, [each and each.tokens for each in ours])
    report: dict[str, Any] = {
        "directory": str(target.path),
        "kind": "tier" if target.is_tier else "shard",
        "format_version": target.manifest,
        "lock": find_holder(target.path)._asdict(),
        "shards": shards,
        "total": total,
        **speed(bytes_read, time.monotonic() - started),
        "notes": [*target.notes, *(note for shard in shards for note in shard.pop("notes"))],
        "ok": not any(shard["problems"] for shard in shards),
    }
    return finish(arguments, report, lambda report: _show(target, report, is_full=is_full))


def _bar(wanted: bool | None) -> Progress:
    """On stderr, where that is a terminal or it is ``wanted``."""
    console = Console(stderr=True, force_terminal=wanted)
    columns = *Progress.get_default_columns(), TransferSpeedColumn()
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _collect(
    reader: ShardReader, views: Sequence[ScannedRegion], told: Mapping[str, _OfNamespace]
) -> dict[str, Any]:
    name, erased = reader.shard.name, reader.erased
    others = [problem_json(name, found, None, file) for file, found in reader.problems()]
    problems = [problem_json(name, found, view) for view in views for found in view.problems]
    states = [view.state for view in views]
    pages = np.concatenate([_identities(view) for view in views] or [np.zeros(0, "V64")])
    now = time.time_ns()
    ages = [max(now - v.header.created_ns, 0) / 1e9 for v in views if v.header is not None]
    report: dict[str, Any] = {
        "name": name,
        "lock": reader.holder._asdict(),
        "checkpoint": reader.checkpoint,
        "regions": len(views),
        **{f"{state}_regions": states.count(state) for state in _STATES},
        "regions_gone_meanwhile": reader.num_gone,
        "extents": sum(len(view.contents.extents) for view in views),
        "pages": len(pages),
        "superseded_pages": len(pages) - len(np.unique(pages)),
        "purged_pages": sum(int(erased.dead_pages(v.sequence, v.contents).sum()) for v in views),
        "damaged_pages": sum(problem["part"] == "page" for problem in problems),
        "tokens": sum(each.tokens for each in told.values()) if told else None,
        "payload_bytes": sum(view.payload_bytes for view in views),
        "physical_bytes": sum(view.file_bytes for view in views),
        "problems": [*others, *problems],
        "notes": [f"{name}: {text}" for text in _notes(reader, views)],
    }
    return report | _figures(report, ages)


def _figures(sums: Mapping[str, Any], ages: Sequence[float]) -> dict[str, Any]:
    """What follows from the sums of a shard, or of all."""
    physical = sums["physical_bytes"]
    return {
        "utilisation": sums["payload_bytes"] / physical if physical else None,
        "oldest_region_age_s": max(ages, default=None),
        "newest_region_age_s": min(ages, default=None),
    }


def _identities(view: ScannedRegion) -> Any:
    """Return namespace and key of every page as one value each."""
    extents, pages = view.contents
    rows = np.zeros(len(pages), [("namespace", "V32"), ("key", "V32")])
    rows["namespace"] = np.repeat(extents["namespace"], extents["num_pages"])
    rows["key"] = pages["key"]
    return rows.view("V64").reshape(-1)


def _count(views: Sequence[ScannedRegion], field: str, entries: dict[str, dict[str, Any]]) -> None:
    """Add pages and payload bytes to the entries of namespaces or tenants."""
    for view in views:
        extents, pages = view.contents
        values, inverse = np.unique(extents[field], return_inverse=True)
        rows = np.repeat(inverse, extents["num_pages"])
        num_pages = np.bincount(rows, minlength=len(values))
        # Exact below 2**53 bytes in one region.
        nbytes = np.bincount(rows, weights=pages["length"], minlength=len(values))
        for value, number_, nbytes_ in zip(values, num_pages, nbytes, strict=True):
            name = value.tobytes().hex()
            entry = entries.setdefault(name, {field: name, "pages": 0, "payload_bytes": 0})
            entry["pages"] += int(number_)
            entry["payload_bytes"] += int(nbytes_)


class _OfNamespace(NamedTuple):
    """Of all pages of a namespace, and of those that a lookup can hit."""

    stored_bytes: int
    page_bytes: int  # in memory
    tokens: int


def _told_of(reader: ShardReader, views: Sequence[ScannedRegion]) -> dict[str, _OfNamespace]:
    """Return what the noted sizes of pages tell of namespaces. Left out is one where the lengths of
    pages do not tell."""
    found = {}
    sizes = read_page_sizes(read_note(reader.shard, PAGE_SIZES_NAME))
    for namespace, noted in sizes.items():
        stored_bytes, page_bytes, keys = 0, 0, [np.zeros(0, "V32")]
        for view in views:
            contents = view.contents
            ours = np.repeat(contents.of_namespace(namespace), contents.extents["num_pages"])
            alive = ~reader.erased.dead_pages(view.sequence, contents)[ours]
            pages = contents.pages[ours]
            in_memory = noted.in_memory(pages["length"])
            if (in_memory < 0).any():
                break
            stored_bytes += int(pages["length"].sum(dtype=np.int64))
            page_bytes += int(in_memory.sum())
            keys.append(pages["key"][alive & (in_memory == noted.nbytes)])
        else:
            if page_bytes:
                tokens = len(np.unique(np.concatenate(keys))) * noted.num_tokens
                told = _OfNamespace(stored_bytes, page_bytes, tokens // noted.num_pools)
                found[namespace.hex()] = told
    return found


def _sum_tokens(shards: Sequence[dict[str, Any]], tokens: Sequence[int | None]) -> int | None:
    """Add up what shards hold; None where no shard knows. Ranks of one replica hold parts of the
    same tokens, which count once."""
    by_replica: dict[str, int] = {}
    for shard, known in zip(shards, tokens, strict=True):
        if known is not None:
            replica = shard["name"].partition("-dp")[2]
            by_replica[replica] = max(by_replica.get(replica, 0), known)
    return sum(by_replica.values()) if by_replica else None


def _notes(reader: ShardReader, views: Sequence[ScannedRegion]) -> Iterator[str]:
    """What is neither damage nor in a table."""
    versions = {view.version for view in views if view.version is not None}
    for version in sorted(versions):
        fate = "a newer version wrote them" if version > FORMAT_VERSION else "they are not read"
        number = sum(view.version == version for view in views)
        yield f"{number} regions are of format {version}, not {FORMAT_VERSION}: {fate}"
    for view in views:
        if view.state != "open":
            continue
        if reader.holder.may_write:
            written = format_bytes(view.tail)
            yield f"{view.name} is open: the server writes to it, {written} so far"
            continue
        text = f"{view.name} was left open, as a crash leaves it; the next server start seals it"
        if view.torn_bytes:
            text += (
                f" and drops what lies behind offset {view.tail}, which was being written "
                "and does not verify"
            )
        yield text
    pins = reader.pins
    if pins.pins:
        yield f"{len(pins.pins)} pins name {len({k for p in pins.pins for k in p.keys}):,} pages"
    if pins.newer:
        yield f"{len(pins.newer)} pins are of a newer version"
    if reader.num_gone:
        yield f"{reader.num_gone} regions were reclaimed while this ran"


def _show(target: StoreTarget, report: dict[str, Any], *, is_full: bool) -> None:
    shards, total = report["shards"], report["total"]
    if target.is_tier:
        version = "format unknown" if target.manifest is None else f"format {target.manifest}"
        holder = Holder(**report["lock"])
        print_lines([f"{target.path}: tier directory, {version}, {holder}"])
    else:
        print_lines([f"{target.path}: shard directory"])
    for shard in shards:
        lock, checkpoint = Holder(**shard["lock"]), _checkpoint_text(shard["checkpoint"])
        print_lines([f"{shard['name']}: {lock}; {checkpoint}"])
    print_lines([""])
    name = {"shard": ("name", str)}
    checked = {"bad pages": ("damaged_pages", number)} if is_full else {}
    print_entries(shards, {**name, **_REGION_COLUMNS, **checked}, total)
    print_entries(shards, {**name, **_PAGE_COLUMNS}, total)
    if total["namespaces"]:
        print_entries(total["namespaces"], {"namespace": ("namespace", digest), **_OF_NAMESPACE})
    if any(int(entry["tenant"], 16) for entry in total["tenants"]):  # they have names here
        print_entries(total["tenants"], {"tenant": ("tenant", digest), **_OF_TENANT})
    problems = [problem for shard in shards for problem in shard["problems"]]
    print_damage([problem_text(problem) for problem in problems], report["notes"])
    if is_full:
        others = sum(problem["region"] is None for problem in problems)
        damage = (
            f"{total['damaged_regions']} of {total['regions']} regions, "
            f"{total['damaged_pages']:,} of {total['pages']:,} pages"
            f"{f', {others} other files' if others else ''}"
        )
        print_verdict(report, damage)


def _checkpoint_text(checkpoint: dict[str, Any]) -> str:
    if not checkpoint["present"]:
        return "no checkpoint"
    if not checkpoint["valid"]:
        return "its checkpoint does not verify, and only speeds up the next start"
    return f"checkpoint of {checkpoint['num_regions']} regions"
