"""``HeldPages``: which server holds which pages, in which memory, as its events say.

A set for each memory of each server, of the 64-bit names of ``prompt.page_keys``; about 100 bytes a
page. What ``PageFollower`` knows of NVMe comes on top, as bits of servers. Of one thread.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from sglang_tiered.policy.routing import Held

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Sequence


DEVICE, HOST, DISK, EXTERNAL = 1, 2, 4, 8
_ALL = (DEVICE, HOST, DISK, EXTERNAL)
MEDIA = {"GPU": DEVICE, "CPU_PINNED": HOST, "DISK": DISK, "EXTERNAL": EXTERNAL}
"""By the names of SGLang's events."""
MAX_PAGES = 4 << 20
"""Of one memory of a server; what comes beyond is not known here."""


class HeldPages:
    """Servers are the positions of a ``RouterView``."""

    def __init__(self) -> None:
        self._held: dict[int, dict[int, set[int]]] = {}
        self._soon: dict[int, Counter[int]] = {}

    def num_pages(self, server: int) -> int:
        """Return how many pages are known in that memory of a server which holds the most."""
        return max(map(len, self._held.get(server, {}).values()), default=0)

    def store(self, server: int, media: int, keys: Collection[int]) -> None:
        """Note that the server holds these pages."""
        memories = self._held.setdefault(server, {medium: set() for medium in _ALL})
        for medium in _ALL:
            if media & medium and len(memories[medium]) + len(keys) <= MAX_PAGES:
                memories[medium].update(keys)

    def remove(self, server: int, media: int, keys: Collection[int]) -> None:
        """Note that it holds them no longer."""
        for medium, held in self._held.get(server, {}).items():
            if media & medium:
                held.difference_update(keys)

    def forget(self, server: int, media: int = DEVICE | HOST | DISK | EXTERNAL) -> None:
        """Forget what the server holds in these memories."""
        memories = self._held.get(server, {})
        for medium in memories:
            if media & medium:
                memories[medium] = set()

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

    def own(
        self, server: int, keys: Sequence[int], bits: Sequence[int] = (), bit: int = 0
    ) -> tuple[int, int, int]:
        """Return how many leading pages the server itself holds: on the device, up to host memory,
        and up to its NVMe. ``bits``: for each page, who holds it there too."""
        memories = self._held.get(server, {})
        nothing: Container[int] = ()
        soon = self._soon.get(server, nothing)
        device, host, disk = (memories.get(one, nothing) for one in (DEVICE, HOST, DISK))
        at, most, ends = 0, len(keys), []
        bit = bit if bits else 0
        for more, last, mine in ((nothing, nothing, 0), (host, nothing, 0), (host, disk, bit)):
            while at < most and (
                (key := keys[at]) in device
                or key in soon
                or key in more
                or key in last
                or (mine and bits[at] & mine)
            ):
                at += 1
            ends.append(at)
        return ends[0], ends[1], ends[2]

    def shared(
        self,
        servers: Collection[int],
        keys: Sequence[int],
        bits: Sequence[int] = (),
        mask: int = 0,
    ) -> Shared:
        """Return what these servers hold of a prompt together, looked up as far as it is asked for.
        ``mask``: their bits."""
        known = [memories for server in servers if (memories := self._held.get(server))]
        return Shared(
            keys, {one: [memories[one] for memories in known] for one in _ALL}, bits, mask
        )

    def held(
        self,
        server: int,
        keys: Sequence[int],
        page_tokens: int,
        shared: Shared | None = None,
        *,
        bit: int = 0,
        has_peers: bool = False,
        has_bucket: bool = False,
    ) -> Held:
        """Return what the server can have of these pages, in tokens. ``shared``: what it and those
        from which it fetches hold."""
        device, host, nvme = self.own(server, keys, () if shared is None else shared.bits, bit)
        peers = shared.end(nvme, DISK) if has_peers and shared is not None else nvme
        bucket = shared.end(peers, EXTERNAL) if has_bucket and shared is not None else peers
        ends = (0, device, host, nvme, peers, bucket)
        return Held(
            *((end - start) * page_tokens for start, end in zip(ends, ends[1:], strict=False))
        )


class Shared:
    """What several servers hold of one prompt. Who had the last page is asked first for the next,
    and a run that was found is not looked for again."""

    def __init__(
        self,
        keys: Sequence[int],
        memories: dict[int, list[set[int]]],
        bits: Sequence[int],
        mask: int,
    ) -> None:
        self._keys, self._memories = keys, memories
        self.bits, self._mask = bits, mask if bits else 0
        self._run: dict[int, tuple[int, int]] = {}

    def end(self, start: int, medium: int) -> int:
        """Return where the run of pages from ``start`` ends that somebody holds in a memory."""
        first, end = self._run.get(medium, (0, -1))
        if first <= start <= end:
            return end
        held, at = self._memories[medium], start
        bits, mask = self.bits, self._mask if medium == DISK else 0
        while at < len(self._keys) and (
            (mask and bits[at] & mask) or _is_held(self._keys[at], held)
        ):
            at += 1
        self._run[medium] = start, at
        return at


def _is_held(key: int, held: list[set[int]]) -> bool:
    for place, one in enumerate(held):
        if key in one:
            if place:
                held[0], held[place] = one, held[0]
            return True
    return False
