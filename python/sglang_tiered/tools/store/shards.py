"""``stat`` and ``verify`` of a directory: what it holds, how full it is and who uses it. The first
reads no sealed payload; the second reads everything, and checks it against its checksums."""

from __future__ import annotations

import functools
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, TransferSpeedColumn

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import format_bytes
from sglang_tiered.storage.region.format import FORMAT_VERSION, PAGE_SIZES_NAME
from sglang_tiered.storage.region.notes import note_of, read_page_sizes
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
from sglang_tiered.tools.store.scan import Holder, find_holder, open_shards, resolve
from sglang_tiered.tools.terminal import print_lines

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from sglang_tiered.storage.region.notes import PageSize
    from sglang_tiered.tools.store.scan import ScannedRegion, ShardReader, StoreTarget


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
            held = _ShardSums(reader)
            for view in reader.views(full=is_full, jobs=arguments.jobs):
                bar.advance(task, view.file_bytes)
                bytes_read += view.bytes_read
                held.add(view)
                for field, entries in counted.items():
                    _count(view, field, entries)
            told.append(held.told())
            shards.append(held.report(told[-1]))
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
        entry["tokens"] = _sum_tokens(
            shards, [None if each is None else each.tokens for each in ours]
        )
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


class _ShardSums:
    """Adds up what the regions of a shard hold. Of a page it keeps 8 bytes, or 16 where the size of
    pages was noted: their records take 44, and a shard may have a hundred million."""

    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader
        self._sums: Counter[str] = Counter()
        self._pages = [np.zeros(0, np.uint64)]
        self._ages: list[float] = []
        self._versions: Counter[int] = Counter()
        self._problems: list[dict[str, Any]] = []
        self._notes: list[str] = []
        sizes = read_page_sizes(note_of(reader.shard, PAGE_SIZES_NAME))
        self._told = {namespace: _ToldOf(noted) for namespace, noted in sizes.items()}

    def add(self, view: ScannedRegion) -> None:
        contents = view.contents
        alive = ~self._reader.erased.dead_pages(view.sequence, contents)
        name = self._reader.shard.name
        self._problems += [problem_json(name, found, view) for found in view.problems]
        self._notes += _notes_of(view, self._reader.holder)
        if view.version is not None:
            self._versions[view.version] += 1
        if view.header is not None:
            self._ages.append(max(time.time_ns() - view.header.created_ns, 0) / 1e9)
        namespaces = np.repeat(_words(contents.extents["namespace"]), contents.extents["num_pages"])
        keys = _words(contents.pages["key"])
        self._pages.append(namespaces ^ keys)
        self._sums.update(
            {
                "regions": 1,
                f"{view.state}_regions": 1,
                "extents": len(contents.extents),
                "pages": len(contents.pages),
                "purged_pages": int((~alive).sum()),
                "damaged_pages": sum(found.part == "page" for found in view.problems),
                "payload_bytes": view.payload_bytes,
                "physical_bytes": view.file_bytes,
            }
        )
        for namespace, told in self._told.items():
            ours = np.repeat(contents.of_namespace(namespace), contents.extents["num_pages"])
            told.add(contents.pages["length"][ours], keys[ours], alive[ours])

    def told(self) -> dict[str, _ToldOf]:
        """Return what the noted sizes of pages tell, by namespaces."""
        return {name.hex(): told for name, told in self._told.items() if told.is_known}

    def report(self, told: Mapping[str, _ToldOf]) -> dict[str, Any]:
        reader, num_pages = self._reader, self._sums["pages"]
        name = reader.shard.name
        others = [problem_json(name, found, None, file) for file, found in reader.problems()]
        notes = [*_notes(reader, self._versions), *self._notes]
        report: dict[str, Any] = {
            "name": name,
            "lock": reader.holder._asdict(),
            **{key: self._sums[key] for key in _SUMMED},
            "regions_gone_meanwhile": reader.num_gone,
            "superseded_pages": num_pages - _num_different(self._pages),
            "tokens": sum(each.tokens for each in told.values()) if told else None,
            "problems": [*others, *self._problems],
            "notes": [f"{name}: {text}" for text in notes],
        }
        return report | _figures(report, self._ages)


def _figures(sums: Mapping[str, Any], ages: Sequence[float]) -> dict[str, Any]:
    """What follows from the sums of a shard, or of all."""
    physical = sums["physical_bytes"]
    return {
        "utilisation": sums["payload_bytes"] / physical if physical else None,
        "oldest_region_age_s": max(ages, default=None),
        "newest_region_age_s": min(ages, default=None),
    }


def _words(digests: Any) -> Any:
    """Return the first 8 bytes of digests: two of a hundred million are the same by a chance of 1
    in 3,700."""
    return np.ascontiguousarray(digests).view(np.uint64).reshape(len(digests), 4)[:, 0].copy()


def _num_different(parts: Sequence[Any]) -> int:
    values = np.concatenate(parts)
    values.sort()  # in place: a set of them, as NumPy makes one, takes several times as much
    return int((values[1:] != values[:-1]).sum()) + (len(values) > 0)


def _count(view: ScannedRegion, field: str, entries: dict[str, dict[str, Any]]) -> None:
    """Add pages and payload bytes to the entries of namespaces or tenants."""
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


class _ToldOf:
    """Adds up what the noted size of its pages tells of a namespace in a shard: of all its pages,
    and of those that a lookup can hit."""

    def __init__(self, noted: PageSize) -> None:
        self._noted, self._is_told = noted, True
        self.stored_bytes = self.page_bytes = 0  # the latter in memory
        self._keys = [np.zeros(0, np.uint64)]

    def add(self, lengths: Any, keys: Any, alive: Any) -> None:
        in_memory = self._noted.in_memory(lengths)
        if (in_memory < 0).any():
            self._is_told, self._keys = False, []
        if self._is_told:
            self.stored_bytes += int(lengths.sum(dtype=np.int64))
            self.page_bytes += int(in_memory.sum())
            self._keys.append(keys[alive & (in_memory == self._noted.nbytes)])

    @property
    def is_known(self) -> bool:
        """Return whether the lengths of pages tell, and there are any."""
        return self._is_told and self.page_bytes > 0

    @functools.cached_property
    def tokens(self) -> int:
        num_keys, self._keys = _num_different(self._keys), []  # those of one shard at a time
        return num_keys * self._noted.num_tokens // self._noted.num_pools


def _sum_tokens(shards: Sequence[dict[str, Any]], tokens: Sequence[int | None]) -> int | None:
    """Add up what shards hold; None where no shard knows. Ranks of one replica hold parts of the
    same tokens, which count once."""
    by_replica: dict[str, int] = {}
    for shard, known in zip(shards, tokens, strict=True):
        if known is not None:
            replica = shard["name"].partition("-dp")[2]
            by_replica[replica] = max(by_replica.get(replica, 0), known)
    return sum(by_replica.values()) if by_replica else None


def _notes(reader: ShardReader, versions: Mapping[int, int]) -> Iterator[str]:
    """What is neither damage nor in a table. ``versions``: how many regions are of others."""
    for version, num_regions in sorted(versions.items()):
        fate = "a newer version wrote them" if version > FORMAT_VERSION else "they are not read"
        yield f"{num_regions} regions are of format {version}, not {FORMAT_VERSION}: {fate}"
    pins = reader.pins
    if pins.pins:
        yield f"{len(pins.pins)} pins name {len({k for p in pins.pins for k in p.keys}):,} pages"
    if pins.newer:
        yield f"{len(pins.newer)} pins are of a newer version"
    if reader.num_gone:
        yield f"{reader.num_gone} regions were reclaimed while this ran"


def _notes_of(view: ScannedRegion, holder: Holder) -> Iterator[str]:
    """The same of one region."""
    if view.state != "open":
        return
    if holder.may_write:
        yield f"{view.name} is open: the server writes to it, {format_bytes(view.tail)} so far"
        return
    text = f"{view.name} was left open, as a crash leaves it; the next server start seals it"
    if view.torn_bytes:
        text += (
            f" and drops what lies behind offset {view.tail}, which was being written "
            "and does not verify"
        )
    yield text


def _show(target: StoreTarget, report: dict[str, Any], *, is_full: bool) -> None:
    shards, total = report["shards"], report["total"]
    if target.is_tier:
        version = "format unknown" if target.manifest is None else f"format {target.manifest}"
        holder = Holder(**report["lock"])
        print_lines([f"{target.path}: tier directory, {version}, {holder}"])
    else:
        print_lines([f"{target.path}: shard directory"])
    for shard in shards:
        print_lines([f"{shard['name']}: {Holder(**shard['lock'])}"])
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
