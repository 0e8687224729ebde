"""``DemotionQueue``: which chain is copied to the bucket next. Pure, no I/O, clock passed in.

Chains that came back go first, since they are worth the most; then the oldest, as they are the next
that NVMe evicts. A chain is queued once, under its first key.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Chain", "DemotionQueue"]

RETRY_GROWTH = 4


@dataclass(slots=True, eq=False)
class Chain:
    """Consecutive pages of one tenant. ``submitted`` is set once all that can be done was begun;
    only a chain that a caller waits for has one."""

    keys: tuple[bytes, ...]
    tenant: bytes
    returned: bool = False
    num_tries: int = 0
    due: float = 0.0
    submitted: threading.Event | None = field(default=None)


class DemotionQueue:
    """Waiting chains, at most ``max_keys`` keys; what does not fit is refused, as a scan finds it
    later. Thread-safe by one lock, which is a leaf."""

    def __init__(
        self, max_keys: int, *, max_tries: int, retry_s: float, clock: Callable[[], float]
    ) -> None:
        self._max_keys = max_keys
        self._max_tries = max_tries
        self._retry_s = retry_s
        self._clock = clock
        self._lock = threading.Lock()
        self._urgent: deque[Chain] = deque()
        self._returned: OrderedDict[bytes, Chain] = OrderedDict()
        self._fresh: OrderedDict[bytes, Chain] = OrderedDict()
        self._failed: deque[Chain] = deque()
        self.num_keys = 0
        self.overflowed = False  # something was refused since a scan began

    @property
    def num_free(self) -> int:
        return max(0, self._max_keys - self.num_keys)

    @property
    def has_urgent(self) -> bool:
        return bool(self._urgent)

    def prioritize(self, chain: Chain) -> None:
        """Put a chain ahead of everything, however full the queue is: a caller waits for it."""
        with self._lock:
            self._urgent.append(chain)
            self.num_keys += len(chain.keys)

    def add(self, keys: Sequence[bytes], tenant: bytes, *, returned: bool = False) -> bool:
        """Queue a chain; false when there is no room."""
        chain = Chain(tuple(keys), tenant, returned)
        with self._lock:
            known = self._find(chain.keys[0])
            grown = len(chain.keys) - (0 if known is None else len(known.keys))
            if known is not None and grown <= 0:
                return True
            if self.num_keys + grown > self._max_keys:
                self.overflowed = True
                return False
            if known is not None:
                chain.returned = chain.returned or known.returned
                self._drop(known)
            queue = self._returned if chain.returned else self._fresh
            queue[chain.keys[0]] = chain
            self.num_keys += len(chain.keys)
            return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a load of these pages: chains that begin with one of them are worth more."""
        with self._lock:
            if not self._fresh:
                return
            for key in keys:
                chain = self._fresh.pop(key, None)
                if chain is not None:
                    chain.returned = True
                    self._returned[key] = chain

    def take(self, *, urgent_only: bool = False) -> Chain | None:
        """Return the next chain, which is the caller's from now on."""
        with self._lock:
            chain = None
            if self._urgent:
                chain = self._urgent.popleft()
            elif urgent_only:
                return None
            elif self._failed and self._failed[0].due <= self._clock():
                chain = self._failed.popleft()
            elif self._returned:
                chain = self._returned.popitem(last=False)[1]
            elif self._fresh:
                chain = self._fresh.popitem(last=False)[1]
            if chain is not None:
                self.num_keys -= len(chain.keys)
            return chain

    def put_back(self, chain: Chain) -> None:
        """Make a chain the next again that could not be tried at all."""
        with self._lock:
            known = self._find(chain.keys[0])
            if known is not None:
                self._drop(known)
            queue = self._returned if chain.returned else self._fresh
            queue[chain.keys[0]] = chain
            queue.move_to_end(chain.keys[0], last=False)
            self.num_keys += len(chain.keys)

    def failed(self, keys: Sequence[bytes], chain: Chain) -> bool:
        """Queue pages of a failed chain again after a pause. False when that was the last time."""
        with self._lock:
            num_tries = chain.num_tries + 1
            full = self.num_keys + len(keys) > self._max_keys
            if num_tries >= self._max_tries or full:
                return False
            pause_s = self._retry_s * RETRY_GROWTH**chain.num_tries
            due = self._clock() + pause_s
            again = Chain(tuple(keys), chain.tenant, chain.returned, num_tries, due)
            self._failed.append(again)
            self.num_keys += len(keys)
            # Few: one per batch that failed.
            self._failed = deque(sorted(self._failed, key=lambda each: each.due))
            return True

    def clear(self) -> None:
        with self._lock:
            for chain in self._urgent:
                if chain.submitted is not None:
                    chain.submitted.set()
            self._urgent.clear()
            self._returned.clear()
            self._fresh.clear()
            self._failed.clear()
            self.num_keys = 0

    def _find(self, key: bytes) -> Chain | None:
        return self._returned.get(key) or self._fresh.get(key)

    def _drop(self, chain: Chain) -> None:
        queue = self._returned if chain.keys[0] in self._returned else self._fresh
        del queue[chain.keys[0]]
        self.num_keys -= len(chain.keys)
