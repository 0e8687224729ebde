"""``stat``, ``verify`` and ``gc`` of a URL: by listings alone, page by page, and by one run of the
collector, which plans only, unless told to delete."""

from __future__ import annotations

import array
import contextlib
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import msgspec

from sglang_tiered.config import format_bytes
from sglang_tiered.errors import ConfigError, StoreError
from sglang_tiered.flags import parse_bytes, parse_duration
from sglang_tiered.storage.bucket.collect import Collector, CollectorSettings
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
from sglang_tiered.storage.region.files import PAGE_SIZES_NAME
from sglang_tiered.storage.region.notes import read_note, read_page_sizes
from sglang_tiered.tools.store.report import (
    MAX_LISTED,
    age_text,
    finish,
    listed,
    number_text,
    speed,
    verdict,
    with_total,
)
from sglang_tiered.tools.store.target import resolve
from sglang_tiered.tools.terminal import print_lines, print_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from sglang_tiered.storage.bucket.directory import Listed
    from sglang_tiered.storage.region.notes import PageSize

__all__ = ["gc", "stat", "verify"]

_WAY_OUT = "pass the URL of a server's object tier"
_OF_STAT = ("pages", "stored_bytes", "erased_pages", "pins", "foreign")
_OF_VERIFY = ("pages", "damaged_pages", "page_bytes", "pins", "gone_meanwhile")


@dataclass(frozen=True)
class _Bucket:
    url: str
    requests: Requests
    namespaces: list[bytes]
    notes: list[str] = field(default_factory=list)


def stat(arguments: argparse.Namespace) -> int:
    sizes = {} if arguments.tier_dir is None else _noted_sizes(arguments.tier_dir)
    target = _open(arguments.place)
    with _requests_end(target.url):
        records = all_records(target.requests)
        erased = BucketErasures.of(records)
        namespaces = [
            _count(target.requests, Layout(name), erased, sizes.get(name))
            for name in target.namespaces
        ]
    report = {
        "url": target.url,
        "namespaces": namespaces,
        "total": {
            **{key: sum(entry[key] for entry in namespaces) for key in _OF_STAT},
            "oldest_age_s": max(_ages(namespaces, "oldest_age_s"), default=None),
            "newest_age_s": min(_ages(namespaces, "newest_age_s"), default=None),
        },
        "erasures": sum(each.what is None or not each.what.is_empty for each in records),
        "requests": target.requests.requests,
        "notes": target.notes,
    }
    return finish(arguments, report, _show_stat)


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


def _count(
    requests: Requests, layout: Layout, erased: BucketErasures, size: PageSize | None
) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(_OF_STAT, 0)
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


def _show_stat(report: dict[str, Any]) -> None:
    _show_namespaces(
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


def verify(arguments: argparse.Namespace) -> int:
    if arguments.region is not None:
        raise ConfigError("--region is for a directory, not for a URL.")
    target = _open(arguments.place)
    started = time.monotonic()
    namespaces: list[dict[str, Any]] = []
    with _requests_end(target.url), ThreadPoolExecutor(arguments.jobs) as pool:
        problems = [
            _problem(record.path, "cannot be read: servers miss all that is older")
            for record in all_records(target.requests)
            if record.what is None
        ]
        for name in target.namespaces:
            counts, found = _verify(target.requests, Layout(name), pool)
            counted = {key: counts[key] for key in _OF_VERIFY}
            namespaces.append({"namespace": name.hex(), **counted, "problems": found})
            problems += found
    report: dict[str, Any] = {
        "url": target.url,
        "namespaces": namespaces,
        "total": {key: sum(entry[key] for entry in namespaces) for key in _OF_VERIFY},
        "problems": problems,
        **speed(target.requests.bytes_in, time.monotonic() - started),
        "requests": target.requests.requests,
        "notes": target.notes,
        "ok": not problems,
    }
    return finish(arguments, report, _show_verify)


def _problem(path: str, what: str) -> dict[str, str]:
    return {"path": path, "problem": what}


def _verify(
    requests: Requests, layout: Layout, pool: ThreadPoolExecutor
) -> tuple[Counter[str], list[dict[str, str]]]:
    """Check page by page, as many at once as the pool has threads. Returns counts and problems."""
    counts: Counter[str] = Counter()
    problems = []
    for chunk in requests.listing(layout.pages):
        named = [(each, name) for each in chunk if (name := parse_page(each.path)) is not None]
        counts["pages"] += len(named)
        counts["page_bytes"] += sum(name.length for _, name in named)
        checked = pool.map(lambda page: _verify_page(requests, *page), named)
        for (each, _), wrong in zip(named, checked, strict=True):
            if wrong is None:
                counts["gone_meanwhile"] += 1
            elif wrong:
                counts["damaged_pages"] += 1
                problems.append(_problem(each.path, wrong))
    for chunk in requests.listing(layout.pins):
        for each in chunk:
            data = requests.whole(each)
            counts["pins"] += 1
            if data is not None and unpack_pin(bytes(data)) is None:
                problems.append(_problem(each.path, "does not verify: what it pinned may go"))
    return counts, problems


def _verify_page(requests: Requests, listed: Listed, name: PageName) -> str | None:
    """Return what is wrong with a page; empty for nothing, None for one that is gone."""
    data = requests.whole(listed)
    if data is None:
        return None
    if len(data) != listed.size:
        return f"has {len(data)} bytes instead of {listed.size}"
    matches = is_page(listed.path, name.checksum, (data,))
    return "" if matches else "does not match the checksum in its name"


def _show_verify(report: dict[str, Any]) -> None:
    _show_namespaces(
        report,
        {
            "pages": lambda entry: f"{entry['pages']:,}",
            "bad pages": lambda entry: f"{entry['damaged_pages']:,}",
            "in the store": lambda entry: format_bytes(entry["page_bytes"]),
            "pins": lambda entry: f"{entry['pins']:,}",
        },
    )
    total, problems = report["total"], report["problems"]
    print_lines(["", *listed([f"{p['path']}: {p['problem']}" for p in problems], "damage: ")])
    print_lines(f"note: {text}" for text in report["notes"])
    if total["gone_meanwhile"]:
        print_lines([f"note: {total['gone_meanwhile']:,} pages were removed while this ran"])
    damage = f"{total['damaged_pages']:,} of {total['pages']:,} pages, {len(problems):,} findings"
    print_lines(verdict(report, damage, f" and {sum(report['requests'].values()):,} requests"))


def gc(arguments: argparse.Namespace) -> int:
    ttl, most = arguments.ttl, arguments.max_bytes
    if ttl is not None:
        ttl = parse_duration("--ttl", ttl)
    if most is not None:
        most = parse_bytes("--max-bytes", most, otherwise="leave it out for no cap")
    settings = CollectorSettings(ttl_s=ttl, capacity_bytes=most)
    target = _open(arguments.place)
    # It is no server: its marker must not make a namespace look used. So by this machine's clock.
    collector = Collector(target.requests, settings, clock=time.time)
    reports = {}
    with _requests_end(target.url):
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
        "notes": target.notes,
    }
    return finish(arguments, report, _show_gc)


def _last_used(requests: Requests, namespace: bytes) -> float:
    return requests.modified(Layout(namespace).collected) or 0.0


def _show_gc(report: dict[str, Any]) -> None:
    print_lines([f"{report['url']}: object tier", ""])
    print_lines(
        f"{entry['namespace'][:16]}: {entry['num_pages']:,} pages, "
        f"{format_bytes(entry['page_bytes'])}"
        for entry in report["namespaces"]
    )
    removals = [each for entry in report["namespaces"] for each in entry["removals"]]
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


def _open(url: str) -> _Bucket:
    """Open the object tier at a URL. Raises ``ConfigError`` and ``StoreError``; creates nothing,
    not even a directory."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"the URL of the object tier is not one; {_WAY_OUT}") from None
    directory = Path(unquote(parts.path)) if parts.scheme == "file" else None
    if directory is not None and not directory.is_dir():
        raise StoreError(f"{url} is not a directory; {_WAY_OUT}")
    if parts.scheme == "memory":
        raise ConfigError(f"{url} is in the memory of another process; {_WAY_OUT}")
    requests = Requests(url)
    namespaces, notes = [], []
    with _requests_end(url):
        for folder in requests.folders(ROOT):
            namespace = namespace_of(folder)
            if namespace is not None:
                namespaces.append(namespace)
            elif folder.rstrip("/") != ERASED:
                notes.append(f"{folder!a} does not belong to the store and is left alone")
    if not namespaces:
        raise StoreError(f"{url} holds nothing of an object tier; {_WAY_OUT}")
    return _Bucket(url, requests, sorted(namespaces), notes)


@contextlib.contextmanager
def _requests_end(url: str) -> Iterator[None]:
    """Turn a failed request into one sentence. The text of the failure holds no secrets."""
    try:
        yield
    except BucketError as error:
        cure = (
            "check the credentials and the region in the environment, what they permit, and the "
            "name of the bucket"
            if error.failure is Failure.DENIED
            else "check the endpoint in the environment and try again"
        )
        raise StoreError(f"{url} cannot be used: {error.clause}; {cure}") from None


def _show_namespaces(
    report: dict[str, Any], columns: dict[str, Callable[[dict[str, Any]], str]]
) -> None:
    """Print what was found in each namespace, and in all where there is not just one."""
    print_lines([f"{report['url']}: object tier", ""])
    shown = with_total(report["namespaces"], report["total"], "namespace")
    rows = [[e["namespace"][:16], *(column(e) for column in columns.values())] for e in shown]
    print_table(["namespace", *columns], rows)
