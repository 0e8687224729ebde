"""``RemoteErasures``: what other servers erased, hidden in the tiers and queued for the scheduler.

It arrives on a thread of the peer tier or of the bucket, and counts as applied once that thread is
done with it: from then on others take pages of this server again. So that thread erases in the
tiers. Device and host memory belong to the scheduler: until it has put a tenant's pages out of
reach there, the gate stores none of them.

Single pages are hidden in memory at once, by their hashes. Where several ranks must hide the same
in the same step, all that memory holds is hidden instead: their exchange has no room for hashes. So
it is in a quarantine (``PurgedTenants``), as memory knows pages by other hashes then.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from sglang_tiered.integration.identity.forgotten_pages import ForgottenPages
    from sglang_tiered.integration.storage.admission_gate import StoreGate
    from sglang_tiered.storage.base import Erasure

__all__ = ["MEMORY", "RemoteErasures"]

MEMORY = b""
"""In place of a tenant: what device and host memory hold is hidden, of every tenant, and the tiers
keep their pages."""

MAX_WAITING = 4096
"""Beyond this number all that memory holds is hidden. The tiers erased each tenant when told."""


class RemoteErasures:
    """Takes erasures by ``__call__``, on any thread; ``PurgeExchange`` uses the rest, on the
    scheduler's. ``erase`` erases in the tiers."""

    def __init__(self, gate: StoreGate, erase: Callable[[Erasure], Future[bool]]) -> None:
        self._gate = gate
        self._erase = erase
        self._forgotten: ForgottenPages | None = None
        self._is_alone = True
        self._early: list[str] = []  # pages that were erased before memory could hear of it
        self._lock = threading.Lock()
        self._waiting: deque[bytes | None] = deque()
        self._is_followed = True

    def __call__(self, what: Erasure) -> Future[bool]:
        """Erase what another server did. True once that is durable here."""
        with self._lock:
            if self._is_followed and what.keys is None:
                self._wait_for(what.tenant)
            elif self._is_followed:
                self._hide([key.hex() for key in what.keys or ()])
        return self._erase(what)

    def use_forgotten(self, forgotten: ForgottenPages, *, is_alone: bool) -> None:
        """Hide pages in memory from now on, and those that were erased before."""
        with self._lock:
            self._forgotten, self._is_alone = forgotten, is_alone
            early, self._early = self._early, []
            if early:
                self._hide(early)

    def _hide(self, hashes: list[str]) -> None:
        if not self._is_alone:
            if MEMORY not in self._waiting:
                self._wait_for(MEMORY)
        elif self._forgotten is None:
            self._early += hashes
        else:
            self._forgotten.hear(hashes)

    def waiting(self) -> list[bytes | None]:
        """Return the tenant that waits longest, if there is one."""
        with self._lock:
            return [self._waiting[0]] if self._waiting else []

    def applied(self, tenant: bytes | None) -> None:
        """Allow stores of a tenant again: its pages in device and host memory are out of reach, and
        every tier erased it once more since."""
        with self._lock:
            if self._waiting and self._waiting[0] == tenant:
                self._waiting.popleft()
            self._block()

    def clear_tiers_only(self) -> None:
        """Leave memory alone from now on: the first rank hears of the same, or there is none that
        could tell the stages of a pipeline of it."""
        with self._lock:
            self._is_followed = False
            self._waiting.clear()
            self._early.clear()
            self._gate.blocked = frozenset()

    def _wait_for(self, tenant: bytes | None) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.clear()
            tenant = MEMORY
        self._waiting.append(tenant)
        self._block()

    def _block(self) -> None:
        self._gate.blocked = frozenset(None if each == MEMORY else each for each in self._waiting)
