"""Waiting for tiers, with a deadline."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sglang_tiered.storage.object import ObjectEngine

if TYPE_CHECKING:
    from sglang_tiered.storage.base import ReadTier

__all__ = ["drained"]

LOOK_S = 0.001


def drained(tier: ReadTier, timeout_s: float) -> bool:
    """Wait until no job of a tier is under way; false when the time ran out."""
    deadline = time.monotonic() + timeout_s
    if isinstance(tier, ObjectEngine) and timeout_s:
        tier.flush(timeout_s)  # what is being filled lingers
    while True:
        stats: Any = tier.stats()
        if not stats.num_inflight_jobs:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_S)
