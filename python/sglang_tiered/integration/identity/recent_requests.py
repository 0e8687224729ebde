"""``RecentRequests``: the prefixes that requests put into the tree lately."""

from __future__ import annotations

import sys
import time
from bisect import bisect_left
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable, Iterator


_MAX_REQUESTS, _MAX_BYTES = 1024, 32 << 20
_MAX_NAMES_BYTES = 4096
"""Of one request's id, keys and conversation, which a client chooses."""


class PrefixSelector(NamedTuple):
    """The tokens of a prefix, and whose they are."""

    tokens: array[int]
    extra_key: str | None
    cache_salt: str | None


class Recent(NamedTuple):
    """A request's prefix, and what is known of its request."""

    rid: str
    selector: PrefixSelector
    tenant: bytes
    conversation: str | None
    number: int  # of the note, the same on every rank: a later one is larger
    used_at_s: float  # since 1970

    @property
    def names_bytes(self) -> int:
        """What its names take in memory."""
        names = (self.rid, self.selector.extra_key, self.selector.cache_salt, self.conversation)
        return sum(sys.getsizeof(name) for name in names if name is not None)

    @property
    def num_bytes(self) -> int:
        """What its tokens and names take in memory."""
        return self.names_bytes + self.selector.tokens.itemsize * len(self.selector.tokens)


class RecentRequests:
    """Keeps what requests put into the tree lately, by their id. A request with long names is not
    kept. Bounded in bytes; scheduler thread only."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._recents: OrderedDict[str, Recent] = OrderedDict()
        self._num_bytes = 0
        self._num_notes = 0
        self._clock = clock

    def note_request(
        self, rid: str, selector: PrefixSelector, tenant: bytes, conversation: str | None = None
    ) -> None:
        self._drop(rid)
        self._num_notes += 1
        recent = Recent(rid, selector, tenant, conversation, self._num_notes, self._clock())
        if recent.names_bytes > _MAX_NAMES_BYTES:
            return
        self._recents[rid] = recent
        self._num_bytes += recent.num_bytes
        while len(self._recents) > _MAX_REQUESTS or self._num_bytes > _MAX_BYTES:
            self._drop(next(iter(self._recents)))

    def find(self, rid: str) -> Recent | None:
        return self._recents.get(rid)

    def of_tenant(self, tenant: bytes) -> Iterator[Recent]:
        """Yield a tenant's requests, the newest first."""
        return (each for each in reversed(self._recents.values()) if each.tenant == tenant)

    def of_conversation(self, tenant: bytes, conversation: str) -> list[Recent]:
        """Return the requests of a tenant's conversation, the newest first."""
        return [each for each in self.of_tenant(tenant) if each.conversation == conversation]

    def forget(
        self,
        selectors: Iterable[PrefixSelector],
        num_kept_tokens: int,
        page_size: int,
        original: Callable[[str | None], str | None],
    ) -> None:
        """Forget the requests that had the first page of any of these prefixes behind its first
        tokens, or the beginning of that page. A prefix without that page counts only where nothing
        is kept. ``original``: see ``HiddenTenants``."""
        end = num_kept_tokens + page_size
        found: dict[tuple[str | None, str | None], set[bytes]] = {}
        for tokens, extra_key, cache_salt in selectors:
            if len(tokens) >= end or not num_kept_tokens:
                first = found.setdefault((original(extra_key), cache_salt), set())
                first.add(tokens[:end].tobytes())
        ordered = {keys: sorted(first) for keys, first in found.items()}
        for recent in list(self._recents.values()) if ordered else ():
            tokens, extra_key, cache_salt = recent.selector
            firsts = ordered.get((original(extra_key), cache_salt), [])
            own = tokens[:end].tobytes()
            at = bisect_left(firsts, own)  # those that begin with it come right behind
            if len(tokens) > num_kept_tokens and at < len(firsts) and firsts[at].startswith(own):
                self._drop(recent.rid)

    def drop_tenant(self, tenant: bytes | None) -> None:
        """Forget the requests of a tenant; of all for None."""
        for recent in list(self._recents.values()):
            if tenant is None or recent.tenant == tenant:
                self._drop(recent.rid)

    def _drop(self, rid: str) -> None:
        dropped = self._recents.pop(rid, None)
        if dropped is not None:
            self._num_bytes -= dropped.num_bytes
