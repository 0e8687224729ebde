"""Opens the object tier at a URL, and finds the namespaces in it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from sglang_tiered.errors import ConfigError, StoreError
from sglang_tiered.storage.bucket.names import ERASED, OLD_ROOTS, ROOT, namespace_of
from sglang_tiered.storage.bucket.requests import Failure, RequestError, Requests
from sglang_tiered.storage.bucket.settings import BucketSettings
from sglang_tiered.tools.store.report import MAX_LISTED
from sglang_tiered.tools.terminal import print_lines, print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["BucketTarget", "open_bucket", "print_namespaces", "refuse_flags", "requests_end"]

_WAY_OUT = "pass the URL of a server's object tier"


@dataclass(frozen=True)
class BucketTarget:
    url: str
    requests: Requests
    namespaces: list[bytes]
    notes: list[str] = field(default_factory=list)


def open_bucket(url: str) -> BucketTarget:
    """Open the object tier at a URL. Raises ``ConfigError`` and ``StoreError``; creates nothing,
    not even a directory."""
    parts = urlsplit(url)
    directory = Path(unquote(parts.path)) if parts.scheme == "file" else None
    if directory is not None and not directory.is_dir():
        raise StoreError(f"{url} is not a directory; {_WAY_OUT}")
    if parts.scheme == "memory":
        raise ConfigError(f"{url} is in the memory of another process; {_WAY_OUT}")
    requests = Requests(BucketSettings(url=url))
    namespaces, notes = [], []
    with requests_end(url):
        for folder in requests.folders(ROOT):
            namespace = namespace_of(folder)
            if namespace is not None:
                namespaces.append(namespace)
            elif folder.rstrip("/") != ERASED:
                notes.append(f"{folder!a} does not belong to the store and is left alone")
        is_old = any(requests.folders(root) for root in OLD_ROOTS)
    if not namespaces and not is_old:
        raise StoreError(f"{url} holds nothing of an object tier; {_WAY_OUT}")
    if is_old:
        notes.append("an earlier version wrote objects there, which nothing reads; gc removes them")
    return BucketTarget(url, requests, sorted(namespaces), notes)


@contextlib.contextmanager
def requests_end(url: str) -> Iterator[None]:
    """Turn a failed request into one sentence. The text of the failure holds no secrets."""
    try:
        yield
    except RequestError as error:
        cure = (
            "check the credentials and the region in the environment, what they permit, and the "
            "name of the bucket"
            if error.failure is Failure.DENIED
            else "check the endpoint in the environment and try again"
        )
        raise StoreError(f"{url} cannot be used: {error.clause}; {cure}") from None


def print_namespaces(
    report: dict[str, Any], columns: dict[str, Callable[[dict[str, Any]], str]]
) -> None:
    """Print what was found in each namespace, and in all where there is not just one."""
    print_lines([f"{report['url']}: object tier", ""])
    entries = list(report["namespaces"])
    shown = entries[:MAX_LISTED]
    if len(entries) != 1:
        shown.append({"namespace": "total", **report["total"]})
    rows = [[e["namespace"][:16], *(column(e) for column in columns.values())] for e in shown]
    print_table(["namespace", *columns], rows)


def refuse_flags(**flags: object) -> None:
    """Flags that are for directories of the NVMe tier only, with what they were given."""
    for name, value in flags.items():
        if value:
            raise ConfigError(f"--{name.replace('_', '-')} is for a directory, not for a URL.")
