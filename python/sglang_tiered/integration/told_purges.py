"""``ToldPurges``: tenants that another server purged, on their way to the scheduler thread.

Another server's purge arrives on a thread of the peer tier, and counts as applied once that thread
is done with it: from then on others take pages from us again. So the tiers forget the tenant there
and then. Device and host memory are the scheduler's: until it has put what they hold out of reach,
none of it may be stored, which the gate sees to.

With several ranks each is told by itself, but requests must go by the same keys on all. What the
first rank was told rides in the exchange of a scheduler step, and all act on it in that step. The
others' own news only clear their tiers: a prefix is found only where every rank holds its part, and
the first rank's part is not while its gate is closed.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from sglang_tiered.integration.rank_agreement import Rule
from sglang_tiered.integration.tenants import UNKNOWN_TENANT
from sglang_tiered.storage.base import TENANT_BYTES
from sglang_tiered.storage.layered.forgetting import LayeredForgetting

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from sglang_tiered.integration.rank_agreement import RankAgreement
    from sglang_tiered.integration.store_gate import StoreGate
    from sglang_tiered.storage.layered.tiers import Unfinished

    class BeginPurge(Protocol):
        def __call__(self, tenant: bytes | None, *, was_told: bool) -> Unfinished: ...


__all__ = ["INITIAL", "RULES", "ToldPurges"]

MAX_WAITING = 4096
"""Beyond it everything is purged, which is never too little."""

_PART_BYTES = 6  # what a float carries exactly
_NUM_PARTS = -(-TENANT_BYTES // _PART_BYTES)
RULES = (Rule.FIRST,) * (2 + _NUM_PARTS)
INITIAL = (0.0,) * len(RULES)
"""What ranks exchange: the number of the purge, whether it is of everything, its tenant."""


class ToldPurges:
    """``__call__`` on any thread; ``next`` and ``acted_on`` on the scheduler's."""

    def __init__(self, gate: StoreGate, begin_purge: BeginPurge) -> None:
        self._gate = gate
        self._begin_purge = begin_purge
        self._lock = threading.Lock()
        self._waiting: deque[bytes | None] = deque()
        self._is_first = True  # of the ranks that agree; what the others are told, it is told too
        self._is_shared = False  # the one that waits longest, with the other ranks
        self._num_acted: int | None = None

    def __call__(self, tenant: bytes | None) -> LayeredForgetting:
        """Another server purged a tenant, or everything. Returns what tells when the tiers here
        have forgotten it for good."""
        with self._lock:
            if self._is_first:
                self._wait_for(tenant)
        begun = [self._begin_purge(each, was_told=True) for each in with_unknown(tenant)]
        return LayeredForgetting(*begun)

    def next(self, agreement: RankAgreement) -> list[bytes | None]:
        """Tenants that every rank puts out of reach in this step: one at most."""
        if self._num_acted is None:
            self._begin(agreement)
        if self._waiting and not self._is_shared:
            self._is_shared = True
            with self._lock:
                tenant = self._waiting[0]
            agreement.share((agreement.agreed[0] + 1, *_as_floats(tenant)))
        number, *parts = agreement.agreed
        if int(number) == self._num_acted:
            return []
        self._num_acted = int(number)
        return [_from_floats(parts)]

    def acted_on(self, tenant: bytes | None) -> None:
        """What device and host memory held of it is out of reach, and every tier forgot it again
        since: stores of it may go on."""
        self._is_shared = False
        with self._lock:
            if self._waiting and self._waiting[0] == tenant:
                self._waiting.popleft()
            self._gate.blocked = frozenset(self._waiting)

    def _begin(self, agreement: RankAgreement) -> None:
        """The number goes on from that of a storage before this one."""
        self._num_acted = int(agreement.agreed[0])
        with self._lock:
            self._is_first = agreement.is_first
            if not self._is_first:
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


def _as_floats(tenant: bytes | None) -> list[float]:
    data = tenant or bytes(TENANT_BYTES)
    parts = [data[at : at + _PART_BYTES] for at in range(0, TENANT_BYTES, _PART_BYTES)]
    return [float(tenant is None), *(float(int.from_bytes(part, "little")) for part in parts)]


def _from_floats(values: Sequence[float]) -> bytes | None:
    is_all, *parts = values
    if is_all:
        return None
    data = b"".join(int(part).to_bytes(_PART_BYTES, "little") for part in parts)
    return data[:TENANT_BYTES]
