"""What things are called in a bucket. Pure.

    v2/<namespace>/pages/<yyyymmddhh>/<mmss>-<stamp>-<tenant>-<key>-<length>-<checksum>
    v2/<namespace>/pins/<digest of the pin's name>
    v2/<namespace>/clock
    v2/erased/<number>-<id>-<what>

A page's name sorts by the time of its upload, so that a listing from a cursor finds what is new.
The listing is the index: it tells everything that a lookup or a load must know. Paths are relative
to the prefix in the URL, which the client adds.
"""

from __future__ import annotations

import calendar
import functools
import hashlib
import re
import time
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from sglang_tiered.storage.base import KEY_BYTES, TENANT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable


ROOT = "v2"
ERASED = f"{ROOT}/erased"
NAMESPACE_BYTES = 32

_MAX_HOUR_S = (1 << 32) - 3600  # the index has 32 bits for a time
_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_PAGE = re.compile(
    rf"(\d{{10}})/(\d{{4}})-([0-9a-f]{{1,8}})-([0-9a-f]{{{2 * TENANT_BYTES}}})"
    rf"-([0-9a-f]{{{2 * KEY_BYTES}}})-([0-9a-f]{{1,8}})-([0-9a-f]{{16}})"
)


class Layout(NamedTuple):
    """The paths of one namespace. Folders have no slash at the end."""

    namespace: bytes

    @property
    def folder(self) -> str:
        return f"{ROOT}/{self.namespace.hex()}"

    @property
    def pages(self) -> str:
        return f"{self.folder}/pages"

    @property
    def pins(self) -> str:
        return f"{self.folder}/pins"

    def pin(self, name: str) -> str:
        return f"{self.pins}/{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"

    @property
    def collected(self) -> str:
        """Return the marker of the last collection; its age tells whether any server lives."""
        return f"{self.folder}/collected"

    @property
    def clock(self) -> str:
        """Return the object that is written to learn the store's time."""
        return f"{self.folder}/clock"


class PageName(NamedTuple):
    """What the name of a page's object says. ``stamp``: the number of the last erasure that its
    writer had applied when the page was submitted (32 bits)."""

    key: bytes
    tenant: bytes
    length: int  # of the page as it is stored
    stamp: int
    unix_s: int  # when the upload began, by the writer's clock
    checksum: int = 0

    def stem(self, layout: Layout) -> str:
        """Return the path but for the checksum, which covers it."""
        hour, rest = _hour_text(self.unix_s // 3600), self.unix_s % 3600
        return (
            f"{layout.pages}/{hour}/{rest // 60:02}{rest % 60:02}-{self.stamp:x}-"
            f"{self.tenant.hex()}-{self.key.hex()}-{self.length:x}-"
        )

    def path(self, layout: Layout) -> str:
        return f"{self.stem(layout)}{self.checksum:016x}"


def page_checksum(stem: str, parts: Iterable[memoryview | bytes]) -> int:
    """Return the checksum of a page as stored: of its name, namespace included, and its bytes. So
    nothing is served under another name than it was written under."""
    checksum = xxhash.xxh3_64(stem.encode())
    for part in parts:
        checksum.update(part)
    return checksum.intdigest()


def is_page(path: str, checksum: int, parts: Iterable[memoryview | bytes]) -> bool:
    """Return whether these bytes were written under this path, whose checksum that is."""
    return page_checksum(path[:-16], parts) == checksum


def parse_page(path: str) -> PageName | None:
    """Return what a path below a folder of pages says; None for a foreign one."""
    match = _PAGE.fullmatch(path.rpartition("/pages/")[2])
    if match is None:
        return None
    hour, rest, stamp, tenant, key, length, checksum = match.groups()
    hour_s = _hour_s(hour)
    minute, second = int(rest[:2]), int(rest[2:])
    if hour_s is None or minute > 59 or second > 59 or not 0 <= hour_s < _MAX_HOUR_S:
        return None
    return PageName(
        bytes.fromhex(key),
        bytes.fromhex(tenant),
        int(length, 16),
        int(stamp, 16),
        hour_s + 60 * minute + second,
        int(checksum, 16),
    )


@functools.lru_cache(64)
def _hour_text(hour: int) -> str:
    return time.strftime("%Y%m%d%H", time.gmtime(hour * 3600))


@functools.lru_cache(4096)
def _hour_s(text: str) -> int | None:
    try:
        return calendar.timegm(time.strptime(text, "%Y%m%d%H"))
    except ValueError:
        return None


def namespace_of(folder: str) -> bytes | None:
    """Return the namespace whose folder this is; None for a foreign one."""
    root, _, name = folder.rstrip("/").rpartition("/")
    return bytes.fromhex(name) if root == ROOT and _NAMESPACE.fullmatch(name) else None
