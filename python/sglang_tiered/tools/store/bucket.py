"""``stat``, ``verify`` and ``gc`` of a URL: by listings alone, page by page, and by one run of the
collector, which plans only, unless told to delete."""

from __future__ import annotations

import array
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

import msgspec

from sglang_tiered.errors import ConfigError, StoreError
from sglang_tiered.flags import format_bytes, parse_bytes, parse_duration
from sglang_tiered.remote_config import object_url
from sglang_tiered.storage.bucket.collect import Collector
from sglang_tiered.storage.bucket.erased import BucketErasures, all_records
from sglang_tiered.storage.bucket.names import (
    ERASED,
    ROOT,
    Layout,
    PageName,
    is_page,
    namespace_of,
    parse_page,
)
from sglang_tiered.storage.bucket.pins import unpack_pin
from sglang_tiered.storage.bucket.requests import BucketError, Failure, Requests
from sglang_tiered.storage.region.format import PAGE_SIZES_NAME
from sglang_tiered.storage.region.notes import note_of, read_page_sizes
from sglang_tiered.tools.store.report import (
    MAX_LISTED,
    age,
    digest,
    finish,
    number,
    print_damage,
    print_entries,
    print_verdict,
    speed,
)
from sglang_tiered.tools.store.scan import resolve
from sglang_tiered.tools.terminal import print_lines

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from sglang_tiered.storage.bucket.directory import Listed
    from sglang_tiered.storage.region.notes import PageSize
    from sglang_tiered.tools.store.report import Columns


_WAY_OUT = "pass the URL of a server's object tier"
_SUMMED = (
    *("pages", "page_bytes", "stored_bytes", "erased_pages", "damaged_pages", "gone_meanwhile"),
    *("pins", "foreign"),
)
_COLUMNS: Columns = {
    "namespace": ("namespace", digest),
    "pages": ("pages", number),
    "tokens": ("tokens", number),
    "in the store": ("stored_bytes", format_bytes),
    "tenants": ("tenants", number),
    "oldest": ("oldest_age_s", age),
    "newest": ("newest_age_s", age),
}


def run(arguments: argparse.Namespace) -> int:
    """Run ``stat``, ``verify`` or ``gc``. The text of a failed request holds no secrets."""
    try:
        return (_gc if arguments.command == "gc" else _look)(arguments)
    except BucketError as error:
        cure = (
            "check the credentials and the region in the environment, what they permit, and the "
            "name of the bucket"
            if error.failure is Failure.DENIED
            else "check the endpoint in the environment and try again"
        )
        raise StoreError(f"{arguments.place} cannot be used: {error.clause}; {cure}") from None


def _look(arguments: argparse.Namespace) -> int:
    """``stat``, from listings alone, and ``verify``, which reads every page."""
    is_full = arguments.command == "verify"
    if arguments.region is not None:
        raise ConfigError("--region is for a directory, not for a URL.")
    noted = None if is_full else arguments.tier_dir
    sizes = {} if noted is None else _noted_sizes(noted)
    requests, names, notes = _open(arguments.place)
    started = time.monotonic()
    records = all_records(requests)
    problems = [
        _problem(record.path, "cannot be read: servers miss all that is older")
        for record in records
        if record.what is None
    ]
    erased, namespaces = BucketErasures.of(records), []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for name in names:
            layout = Layout(name)
            if is_full:
                problems += _bad_pins(requests, layout)
            entry, wrong = _count(requests, layout, erased, sizes.get(name), is_full and pool)
            namespaces.append(entry)
            problems += wrong
    ages = [entry[key] for entry in namespaces for key in ("oldest_age_s", "newest_age_s")]
    report: dict[str, Any] = {
        "url": arguments.place,
        "namespaces": namespaces,
        "total": {
            **{key: sum(entry[key] for entry in namespaces) for key in _SUMMED},
            "tokens": None,
            "tenants": None,
            **_ends([age for age in ages if age is not None]),
        },
        "erasures": sum(each.what is None or not each.what.is_empty for each in records),
        "problems": problems,
        **speed(requests.bytes_in, time.monotonic() - started),
        "requests": requests.requests,
        "notes": notes,
        "ok": not problems,
    }
    return finish(arguments, report, lambda report: _show(report, is_full=is_full))


def _noted_sizes(directory: Path) -> dict[bytes, PageSize]:
    """Return what servers of that directory noted of their pages, by namespace. Raises
    ``StoreError``."""
    sizes: dict[bytes, PageSize] = {}
    for shard in resolve(directory).shards:
        sizes |= read_page_sizes(note_of(shard, PAGE_SIZES_NAME))
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


def _problem(path: str, what: str) -> dict[str, str]:
    return {"path": path, "problem": what}


def _count(
    requests: Requests,
    layout: Layout,
    erased: BucketErasures,
    size: PageSize | None,
    pool: ThreadPoolExecutor | Literal[False],
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Return what a namespace holds, and what is wrong with it. With a pool every page is read, as
    many at once as it has threads."""
    found: dict[str, Any] = dict.fromkeys(_SUMMED, 0)
    tenants, lengths, modified = set[bytes](), array.array("Q"), list[float]()  # first and last
    problems = []
    for chunk in requests.listing(layout.pages):
        named = [(each, name) for each in chunk if (name := parse_page(each.path)) is not None]
        found["foreign"] += len(chunk) - len(named)
        found["pages"] += len(named)
        for each, name in named:
            lengths.append(name.length)
            tenants.add(name.tenant)
            found["page_bytes"] += name.length
            found["stored_bytes"] += each.size
            of_page = layout.namespace, name.tenant, name.key, name.stamp
            found["erased_pages"] += erased.kills(*of_page)
        modified += [each.modified for each, _ in named]
        modified = [min(modified), max(modified)] if modified else []
        if not pool:
            continue
        checked = pool.map(lambda page: _verify_page(requests, *page), named)
        for (each, _), wrong in zip(named, checked, strict=True):
            found["gone_meanwhile"] += wrong is None
            if wrong:
                found["damaged_pages"] += 1
                problems.append(_problem(each.path, wrong))
    found["pins"] = sum(len(chunk) for chunk in requests.listing(layout.pins))
    now = time.time()
    ends = _ends([max(now - each, 0.0) for each in modified])
    tokens, named_tenants = _num_tokens(lengths, size), sum(any(tenant) for tenant in tenants)
    counts = {**found, "tokens": tokens, "tenants": named_tenants}
    return {"namespace": layout.namespace.hex(), **counts, **ends}, problems


def _bad_pins(requests: Requests, layout: Layout) -> list[dict[str, str]]:
    return [
        _problem(each.path, "does not verify: what it pinned may go")
        for chunk in requests.listing(layout.pins)
        for each in chunk
        if (data := requests.whole(each)) is not None and unpack_pin(bytes(data)) is None
    ]


def _ends(ages: Sequence[float]) -> dict[str, float | None]:
    return {"oldest_age_s": max(ages, default=None), "newest_age_s": min(ages, default=None)}


def _verify_page(requests: Requests, listed: Listed, name: PageName) -> str | None:
    """Return what is wrong with a page; empty for nothing, None for one that is gone."""
    data = requests.whole(listed)
    if data is None:
        return None
    if len(data) != listed.size:
        return f"has {len(data)} bytes instead of {listed.size}"
    matches = is_page(listed.path, name.checksum, (data,))
    return "" if matches else "does not match the checksum in its name"


def _show(report: dict[str, Any], *, is_full: bool) -> None:
    print_lines([f"{report['url']}: object tier", ""])
    checked = {"bad pages": ("damaged_pages", number)} if is_full else {}
    print_entries(report["namespaces"], {**_COLUMNS, **checked}, report["total"])
    total, problems = report["total"], report["problems"]
    noted = {
        "names do not belong to the store and are left alone": total["foreign"],
        "pins keep what they name from the cap and its age": total["pins"],
        "erasures are remembered": report["erasures"],
        "pages are erased: no server finds them, and the next collector removes them": total[
            "erased_pages"
        ],
        "pages were removed while this ran": total["gone_meanwhile"],
        "requests were made": sum(report["requests"].values()),
    }
    notes = [f"{count:,} {text}" for text, count in noted.items() if count]
    print_damage([f"{p['path']}: {p['problem']}" for p in problems], [*notes, *report["notes"]])
    if is_full:
        damage = (
            f"{total['damaged_pages']:,} of {total['pages']:,} pages, {len(problems):,} findings"
        )
        print_verdict(report, damage)


def _gc(arguments: argparse.Namespace) -> int:
    ttl, most = arguments.ttl, arguments.max_bytes
    if ttl is not None:
        ttl = parse_duration("--ttl", ttl)
    if most is not None:
        most = parse_bytes("--max-bytes", most, otherwise="leave it out for no cap")
    requests, namespaces, notes = _open(arguments.place)
    # It is no server: its marker must not make a namespace look used. So by this machine's clock.
    collector = Collector(requests, capacity_bytes=most, ttl_s=ttl, clock=time.time)
    # Of the namespaces the one that was used last stays, however long ago that is.
    used = {name: requests.modified(Layout(name).collected) or 0.0 for name in namespaces}
    reports = {
        name: collector.run_once(
            name,
            delete=arguments.delete,
            is_server=False,
            old_namespaces=name == max(used, key=lambda each: used[each]),
        )
        for name in namespaces
    }
    report = {
        "url": arguments.place,
        "deleted": arguments.delete,
        "settings": {"capacity_bytes": most, "ttl_s": ttl},
        "namespaces": [
            {"namespace": name.hex(), **msgspec.to_builtins(found)}
            for name, found in reports.items()
        ],
        "notes": notes,
    }
    return finish(arguments, report, _show_gc)


def _show_gc(report: dict[str, Any]) -> None:
    print_lines([f"{report['url']}: object tier", ""])
    print_lines(
        f"{entry['namespace'][:16]}: {entry['num_pages']:,} pages, "
        f"{format_bytes(entry['page_bytes'])}"
        for entry in report["namespaces"]
    )
    removals = [each for entry in report["namespaces"] for each in entry["removals"]]
    if removals:
        print_entries(
            removals,
            {
                "path": ("path", lambda path: path.rpartition("/")[2][:48]),
                "what": ("kind", str),
                "why": ("reason", str),
                "bytes": ("nbytes", format_bytes),
            },
        )
    if len(removals) > MAX_LISTED:
        print_lines([f"and {len(removals) - MAX_LISTED:,} more; --json lists all"])
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


def _open(url: str) -> tuple[Requests, list[bytes], list[str]]:
    """Open the object tier at a URL: its namespaces, and what is to be noted. Raises
    ``ConfigError`` and ``StoreError``; creates nothing, not even a directory."""
    parts = urlsplit(object_url("PLACE", url))
    if parts.scheme == "file" and not Path(unquote(parts.path)).is_dir():
        raise StoreError(f"{url} is not a directory; {_WAY_OUT}")
    requests = Requests(url)
    namespaces, notes = [], []
    for folder in requests.folders(ROOT):
        namespace = namespace_of(folder)
        if namespace is not None:
            namespaces.append(namespace)
        elif folder.rstrip("/") != ERASED:
            notes.append(f"{folder!a} does not belong to the store and is left alone")
    if not namespaces:
        raise StoreError(f"{url} holds nothing of an object tier; {_WAY_OUT}")
    return requests, sorted(namespaces), notes
