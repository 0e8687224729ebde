"""``RemotePurges``: what other servers purged, hidden in the tiers and queued for the scheduler.

Another server's purge arrives on a thread of the peer tier, and counts as applied once that thread
is done with it: from then on others take pages of this server again. So that thread hides the
tenant in the tiers. Device and host memory belong to the scheduler: until it has put their pages of
the tenant out of reach, the gate stores none of them.
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
"""Beyond this number everything is purged, which is never too little."""


class RemotePurges:
    """Takes purges by ``__call__``, on any thread; ``PurgeExchange`` uses the rest, on the
    scheduler's."""

    def __init__(self, gate: StoreGate, begin_purge: BeginPurge) -> None:
        self._gate = gate
        self._begin_purge = begin_purge
        self._lock = threading.Lock()
        self._waiting: deque[bytes | None] = deque()
        self._is_followed = True

    def __call__(self, tenant: bytes | None) -> Future[bool]:
        """Purge a tenant, or everything, as another server did. True once that is durable here."""
        with self._lock:
            if self._is_followed:
                self._wait_for(tenant)
        begun = [self._begin_purge(each, is_remote=True) for each in with_unknown(tenant)]
        return all_true(begun)

    def waiting(self) -> list[bytes | None]:
        """Return the purge that waits longest, if there is one."""
        with self._lock:
            return [self._waiting[0]] if self._waiting else []

    def applied(self, tenant: bytes | None) -> None:
        """Allow stores of a tenant again: its pages in device and host memory are out of reach, and
        every tier purged it once more since."""
        with self._lock:
            if self._waiting and self._waiting[0] == tenant:
                self._waiting.popleft()
            self._gate.blocked = frozenset(self._waiting)

    def leave_to_the_first_rank(self) -> None:
        """Clear only the tiers from now on: the first rank hears of the same purges."""
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
    """Return what to purge for a tenant: pages of unknown tenants may belong to it."""
    return [None] if tenant is None else [tenant, UNKNOWN_TENANT]
