"""``RemotePurges``: what other servers purged or forgot, hidden in the tiers and queued for the
scheduler.

Another server's purge arrives on a thread of the peer tier, and counts as applied once that thread
is done with it: from then on others take pages of this server again. So that thread hides the
tenant in the tiers. Device and host memory belong to the scheduler: until it has put their pages of
the tenant out of reach, the gate stores none of them.

Single pages, which a bucket tells of too, are hidden in memory at once, by their hashes. Where
several ranks must hide the same in the same step, all that memory holds is hidden instead: their
exchange has no room for hashes. So it is in a quarantine (``PurgedTenants``), as memory knows pages
by other hashes then.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from sglang_tiered.integration.identity.tenants import UNKNOWN_TENANT
from sglang_tiered.storage.promises import all_true

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future
    from typing import Protocol

    from sglang_tiered.integration.storage.admission_gate import StoreGate

    class BeginPurge(Protocol):
        def __call__(self, tenant: bytes | None, *, is_remote: bool) -> Future[bool]: ...

    class ForgetKeys(Protocol):
        def __call__(self, keys: list[bytes], *, is_remote: bool) -> Future[bool]: ...

    from sglang_tiered.integration.identity.forgotten_pages import ForgottenPages


__all__ = ["MEMORY", "RemotePurges", "with_unknown"]

MEMORY = b""
"""In place of a tenant: what device and host memory hold is hidden, of every tenant, and the tiers
keep their pages."""

MAX_WAITING = 4096
"""Beyond this number everything is purged, which is never too little."""


class RemotePurges:
    """Takes purges by ``__call__``, on any thread; ``PurgeExchange`` uses the rest, on the
    scheduler's."""

    def __init__(self, gate: StoreGate, begin_purge: BeginPurge, forget_keys: ForgetKeys) -> None:
        self._gate = gate
        self._begin_purge = begin_purge
        self._forget_keys = forget_keys
        self._forgotten: ForgottenPages | None = None
        self._is_alone = True
        self._early: list[str] = []  # pages that were forgotten before memory could hear of it
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

    def forget(self, keys: Sequence[bytes]) -> Future[bool]:
        """Forget pages, as another server did. True once that is durable here."""
        hashes = [key.hex() for key in keys]
        with self._lock:
            if not self._is_followed:
                pass
            elif not self._is_alone:
                if MEMORY not in self._waiting:
                    self._wait_for(MEMORY)
            elif self._forgotten is None:
                self._early += hashes
            else:
                self._forgotten.hear(hashes)
        return self._forget_keys(list(keys), is_remote=True)

    def use_forgotten(self, forgotten: ForgottenPages, *, is_alone: bool) -> None:
        """Hide pages in memory from now on, and those that were forgotten before."""
        with self._lock:
            self._forgotten, self._is_alone = forgotten, is_alone
            early, self._early = self._early, []
            if not early or not self._is_followed:
                return
            if is_alone:
                forgotten.hear(early)
            else:
                self._wait_for(MEMORY)

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
            self._block()

    def clear_tiers_only(self) -> None:
        """Leave memory alone from now on: the first rank hears of the same purges, or there is none
        that could tell the stages of a pipeline of them."""
        with self._lock:
            self._is_followed = False
            self._waiting.clear()
            self._early.clear()
            self._gate.blocked = frozenset()

    def _wait_for(self, tenant: bytes | None) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.clear()
            tenant = None
        self._waiting.append(tenant)
        self._block()

    def _block(self) -> None:
        self._gate.blocked = frozenset(None if each == MEMORY else each for each in self._waiting)


def with_unknown(tenant: bytes | None) -> list[bytes | None]:
    """Return what to purge for a tenant: pages of unknown tenants may belong to it."""
    return [None] if tenant is None else [tenant, UNKNOWN_TENANT]
