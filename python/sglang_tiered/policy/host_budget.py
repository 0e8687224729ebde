"""``HostBudget``: who may take how much of the host tier.

What is shared out is what the host tier holds beyond device memory, since a prefix on the device
keeps its host copy. Of that loads may fill one half, residents keep one third, and nodes that wait
for their store pin one sixth. So running requests find at least a sixth for what they write.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HostBudget"]

LOADING_SHARE = 1 / 2
RESIDENT_SHARE = 1 / 3
PIN_SHARE = 1 / 6

HINT_SHARE = 1 / 2
"""The share that may be loaded because a conversation is about to be used, until it is."""

MIN_OWN_SHARE = 1 / 4
"""The least that is shared out, of the whole host tier, where device memory leaves less."""


@dataclass(frozen=True, slots=True)
class HostBudget:
    """Shares out one scheduler's host tier, in tokens.

    ``is_small``: copies of what the device holds give way, so all of the tier is shared out, and no
    copy is kept as a resident.
    """

    host_tokens: int
    device_tokens: int
    is_small: bool = False

    @property
    def own_tokens(self) -> int:
        """Return what the host tier holds beyond device memory."""
        if self.is_small:
            return self.host_tokens
        least = int(self.host_tokens * MIN_OWN_SHARE)
        return max(self.host_tokens - self.device_tokens, least)

    @property
    def loading_tokens(self) -> int:
        """Return what loads may fill before their requests are admitted."""
        return max(1, int(self.own_tokens * LOADING_SHARE))

    @property
    def resident_tokens(self) -> int:
        """Return what residents may keep."""
        return 0 if self.is_small else max(1, int(self.own_tokens * RESIDENT_SHARE))

    @property
    def pinned_tokens(self) -> float:
        """Return what nodes that wait for their store may pin, whatever loads take."""
        return self.own_tokens * PIN_SHARE

    def unused_by_loads(self, num_loading: int) -> float:
        """Return what such nodes may pin besides, while loads take ``num_loading`` tokens."""
        return max(0.0, self.own_tokens * LOADING_SHARE - num_loading)

    @property
    def hinted_tokens(self) -> int:
        """Return what hints may load, as long as nobody has used it."""
        return int(self.own_tokens * HINT_SHARE)
