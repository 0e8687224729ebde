"""``PendingStores``: stores that were announced to the storage thread and have not reached it yet.

SGLang queues the store of a radix node on the scheduler thread and carries it out on a thread that
does one at a time. What admission must know about it (how long the chain is, how long it waited,
how much host memory waits behind it) is known at the first place and needed at the second; this
table carries it across. Operations arrive in the order they were announced, so whatever was
announced before one that arrives is never going to, and is forgotten: nothing leaks.

Thread-safe; the lock is held for table work only. Sizes are tokens.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["PendingStore", "PendingStores"]

MAX_WAITING = 4096
"""Beyond this number the oldest is forgotten, and counts as short when it arrives."""


class PendingStore(NamedTuple):
    """Describes an operation that arrived at the storage thread."""

    hashes: tuple[str, ...]
    prefix_tokens: int
    waited_s: float
    tokens_behind: int  # of the operations still waiting
    tenant: bytes | None  # None: purged since it was announced


@dataclass(slots=True)
class _Waiting:
    hashes: tuple[str, ...]
    prefix_tokens: int
    num_tokens: int
    since: float
    tenant: bytes | None


class PendingStores:
    """Owns what one scheduler has announced and the storage thread has not taken, oldest first. A
    courier, not a second queue: ``SpillQueue`` owns whether a store is under way."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()  # by first page
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def announce_store(
        self, hashes: Sequence[str], *, num_tokens: int, prefix_tokens: int, tenant: bytes
    ) -> None:
        """Announce that ``hashes`` are about to be queued; they end a chain of that length."""
        if not hashes:
            return
        with self._lock:
            self._forget(hashes[0])
            while len(self._waiting) >= MAX_WAITING:
                self._forget(next(iter(self._waiting)))
            entry = _Waiting(tuple(hashes), prefix_tokens, num_tokens, self._clock(), tenant)
            self._waiting[hashes[0]] = entry
            self._num_tokens += num_tokens

    def lengthen_chain(self, first: str, prefix_tokens: int) -> bool:
        """Note that the chain of the operation that begins with a page grew; return False if the
        operation is not waiting."""
        with self._lock:
            entry = self._waiting.get(first)
            if entry is None:
                return False
            entry.prefix_tokens = max(entry.prefix_tokens, prefix_tokens)
            return True

    def take_store(self, hashes: Sequence[str]) -> PendingStore | None:
        """Take the operation that these pages begin or end, and forget every older one.

        The pages of another pool than KV come first and may be the last ones of the chain only.
        """
        with self._lock:
            first = hashes[0]
            if first not in self._waiting:
                ends = (k for k, entry in self._waiting.items() if entry.hashes[-1] == hashes[-1])
                found = next(ends, None)
                if found is None:
                    return None
                first = found
            while (oldest := next(iter(self._waiting))) != first:
                self._forget(oldest)
            entry = self._waiting[first]
            self._forget(first)
            waited_s = self._clock() - entry.since
            return PendingStore(
                entry.hashes, entry.prefix_tokens, waited_s, self._num_tokens, entry.tenant
            )

    def purge_tenant(self, tenant: bytes | None) -> None:
        """Have waiting operations of a tenant (None: of all) refused when they arrive."""
        with self._lock:
            for entry in self._waiting.values():
                if tenant is None or entry.tenant == tenant:
                    entry.tenant = None

    def clear(self) -> None:
        """Forget all operations: the queue was emptied."""
        with self._lock:
            self._waiting.clear()
            self._num_tokens = 0

    def _forget(self, first: str) -> None:
        entry = self._waiting.pop(first, None)
        if entry is not None:
            self._num_tokens -= entry.num_tokens
