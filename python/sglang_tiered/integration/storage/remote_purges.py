"""Tenants that other servers purged: forgotten in the tiers, and on their way to the scheduler.

Another server's purge arrives on a thread of the peer tier, and counts as applied once that thread
is done with it: from then on others take pages from us again. So the tiers forget the tenant there
and then. Device and host memory are the scheduler's: until it has put what they hold out of reach,
none of it may be stored, which the gate sees to.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from sglang_tiered.integration.identity.tenants import UNKNOWN_TENANT
from sglang_tiered.storage.promises import all_true

if TYPE_CHECKING:
    from concurrent.futures import Future
    from typing import Protocol

    from sglang_tiered.integration.storage.admission_gate import StoreGate

    class BeginPurge(Protocol):
        def __call__(self, tenant: bytes | None, *, is_remote: bool) -> Future[bool]: ...


__all__ = ["RemotePurges", "with_unknown"]

MAX_WAITING = 4096
"""Beyond it everything is purged, which is never too little."""


class RemotePurges:
    """``__call__`` on any thread; the rest is for ``PurgeExchange``, on the scheduler's."""

    def __init__(self, gate: StoreGate, begin_purge: BeginPurge) -> None:
        self._gate = gate
        self._begin_purge = begin_purge
        self._lock = threading.Lock()
        self._waiting: deque[bytes | None] = deque()
        self._is_followed = True

    def __call__(self, tenant: bytes | None) -> Future[bool]:
        """Another server purged a tenant, or everything. True once the tiers here have
        forgotten it for good."""
        with self._lock:
            if self._is_followed:
                self._wait_for(tenant)
        begun = [self._begin_purge(each, is_remote=True) for each in with_unknown(tenant)]
        return all_true(begun)

    def waiting(self) -> list[bytes | None]:
        """The one that waits longest, if any does."""
        with self._lock:
            return [self._waiting[0]] if self._waiting else []

    def applied(self, tenant: bytes | None) -> None:
        """What device and host memory held of it is out of reach, and every tier forgot it again
        since: stores of it may go on."""
        with self._lock:
            if self._waiting and self._waiting[0] == tenant:
                self._waiting.popleft()
            self._gate.blocked = frozenset(self._waiting)

    def leave_to_the_first_rank(self) -> None:
        """Only the tiers are cleared from now on: what this rank hears the first one hears too."""
        with self._lock:
            self._is_followed = False
            self._waiting.clear()
            self._gate.blocked = frozenset()

    def _wait_for(self, tenant: bytes | None) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.clear()
            tenant = None
        self._waiting.append(tenant)
        self._gate.blocked = frozenset(self._waiting)


def with_unknown(tenant: bytes | None) -> list[bytes | None]:
    """What to purge for a tenant: a page that nobody knows the tenant of may be this one's."""
    return [None] if tenant is None else [tenant, UNKNOWN_TENANT]
