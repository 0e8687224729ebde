"""``PurgeExchange``: purges of other servers, put out of reach on all ranks in the same step.

Each rank hears of a purge by itself, but requests must go by the same keys on all. The purge that
the first rank hears of rides in the exchange of a scheduler step, and all ranks apply it in that
step. What the other ranks hear only clears their tiers: a prefix is found only where every rank
holds its part, and the first rank's part is missing while its gate is closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tiered.integration.ranks.rank_consensus import Rule
from sglang_tiered.integration.storage.remote_erasures import MEMORY
from sglang_tiered.storage.base import TENANT_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.integration.ranks.rank_consensus import RankAgreement
    from sglang_tiered.integration.storage.remote_erasures import RemoteErasures

__all__ = ["INITIAL", "RULES", "PurgeExchange"]

_PART_BYTES = 6  # what a float carries exactly
_NUM_PARTS = -(-TENANT_BYTES // _PART_BYTES)
RULES = (Rule.FIRST,) * (2 + _NUM_PARTS)
INITIAL = (0.0,) * len(RULES)
"""What ranks exchange: the number of the purge, what it is of, its tenant."""

_TENANT, _EVERYTHING, _MEMORY = 0.0, 1.0, 2.0


class PurgeExchange:
    """Carries the remote purges of one storage to all ranks. Scheduler thread."""

    def __init__(self, purges: RemoteErasures, agreement: RankAgreement) -> None:
        self.purges = purges
        self._agreement = agreement
        # The number goes on from that of a storage before this one.
        self._num_applied = int(agreement.agreed[0])
        self._is_shared = False  # the one that waits longest, with the other ranks
        if not agreement.is_first:
            purges.clear_tiers_only()

    def next(self) -> list[bytes | None]:
        """Return the tenants that every rank puts out of reach in this step, one at most; or
        ``MEMORY``."""
        agreement = self._agreement
        if not self._is_shared:
            for tenant in self.purges.waiting():
                self._is_shared = True
                agreement.share_values((agreement.agreed[0] + 1, *_as_floats(tenant)))
        number, *parts = agreement.agreed
        if int(number) == self._num_applied:
            return []
        self._num_applied = int(number)
        return [_from_floats(parts)]

    def applied(self, tenant: bytes | None) -> None:
        """See ``RemoteErasures.applied``."""
        self._is_shared = False
        self.purges.applied(tenant)


def _as_floats(tenant: bytes | None) -> list[float]:
    kind = _EVERYTHING if tenant is None else _MEMORY if tenant == MEMORY else _TENANT
    data = tenant or bytes(TENANT_BYTES)
    parts = [data[at : at + _PART_BYTES] for at in range(0, TENANT_BYTES, _PART_BYTES)]
    return [kind, *(float(int.from_bytes(part, "little")) for part in parts)]


def _from_floats(values: Sequence[float]) -> bytes | None:
    kind, *parts = values
    if kind != _TENANT:
        return None if kind == _EVERYTHING else MEMORY
    data = b"".join(int(part).to_bytes(_PART_BYTES, "little") for part in parts)
    return data[:TENANT_BYTES]
