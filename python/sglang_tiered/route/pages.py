"""``PageIndex``: which server holds which pages, in which memory, as its events say.

A dictionary for each server, of the 64-bit names of ``prompt.page_keys``; about 100 bytes a page.
Of one thread.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from sglang_tiered.policy.routing import Held

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

__all__ = ["DEVICE", "DISK", "EXTERNAL", "HOST", "MEDIA", "PageIndex"]

DEVICE, HOST, DISK, EXTERNAL = 1, 2, 4, 8
MEDIA = {"GPU": DEVICE, "CPU_PINNED": HOST, "DISK": DISK, "EXTERNAL": EXTERNAL}
"""By the names of SGLang's events."""
MAX_PAGES = 4 << 20
"""Of one server; what comes beyond is not known here."""


class PageIndex:
    """Servers are the positions of a ``RouterView``."""

    def __init__(self) -> None:
        self._held: dict[int, dict[int, int]] = {}
        self._soon: dict[int, Counter[int]] = {}

    def num_pages(self, server: int) -> int:
        """Return how many pages of a server are known."""
        return len(self._held.get(server, ()))

    def store(self, server: int, medium: int, keys: Iterable[int]) -> None:
        """Note that the server holds these pages."""
        held = self._held.setdefault(server, {})
        for key in keys:
            if key in held or len(held) < MAX_PAGES:
                held[key] = held.get(key, 0) | medium

    def remove(self, server: int, medium: int, keys: Iterable[int]) -> None:
        """Note that it holds them no longer."""
        held = self._held.get(server, {})
        for key in keys:
            left = held.get(key, 0) & ~medium
            if left:
                held[key] = left
            else:
                held.pop(key, None)

    def forget(self, server: int, media: int = DEVICE | HOST | DISK | EXTERNAL) -> None:
        """Forget what the server holds in these memories."""
        held = self._held.get(server, {})
        self._held[server] = {key: left for key, has in held.items() if (left := has & ~media)}

    def drop(self, server: int) -> None:
        """Forget a server, and what it was sent: another may take its place."""
        self._held.pop(server, None)
        self._soon.pop(server, None)

    def expect(self, server: int, keys: Iterable[int]) -> None:
        """Take pages for held on the device, as they will be when a request that was sent there has
        its first token; ``settle`` takes that back."""
        self._soon.setdefault(server, Counter()).update(keys)

    def settle(self, server: int, keys: Iterable[int]) -> None:
        """Leave it to events from here on."""
        soon = self._soon.get(server)
        if soon is not None:
            soon.subtract(keys)
            for key in keys:
                if soon[key] <= 0:
                    del soon[key]

    def own(self, server: int, keys: Sequence[int]) -> tuple[int, int, int]:
        """Return how many leading pages the server itself holds: on the device, up to host memory,
        and up to its NVMe."""
        held: Mapping[int, int] = self._held.get(server, {})
        soon: Mapping[int, int] = self._soon.get(server, {})
        ends = [0, 0, 0]
        level = 0
        for at, key in enumerate(keys):
            has = held.get(key, 0) | (DEVICE if key in soon else 0)
            while level < 3 and not has & ((2 << level) - 1):
                level += 1
            if level == 3:
                break
            ends[level] = at + 1
        return ends[0], max(ends[:2]), max(ends)

    def shared(self, servers: Collection[int], keys: Sequence[int]) -> list[int]:
        """Return the memories in which any of these servers holds each page, until one that none
        does."""
        found = []
        maps = [held for server in servers if (held := self._held.get(server))]
        for key in keys:
            has = 0
            for held in maps:
                has |= held.get(key, 0)
            if not has:
                break
            found.append(has)
        return found

    def held(
        self,
        server: int,
        keys: Sequence[int],
        page_tokens: int,
        shared: Sequence[int] = (),
        *,
        has_peers: bool = False,
        has_bucket: bool = False,
    ) -> Held:
        """Return what the server can have of these pages, in tokens. ``shared``: what it and those
        from which it fetches hold."""
        device, host, nvme = self.own(server, keys)
        at = nvme
        while has_peers and at < len(shared) and shared[at] & DISK:
            at += 1
        peers = at
        while has_bucket and at < len(shared) and shared[at] & EXTERNAL:
            at += 1
        ends = (0, device, host, nvme, peers, at)
        return Held(
            *((end - start) * page_tokens for start, end in zip(ends, ends[1:], strict=False))
        )
