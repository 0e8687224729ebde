"""``LayeredForgetting``: one purge of two tiers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_tiered.storage.layered.tiers import Unfinished

__all__ = ["LayeredForgetting"]


class LayeredForgetting:
    """Begun in every tier: nothing of it is a hit any more."""

    def __init__(self, *parts: Unfinished) -> None:
        self._parts = parts

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return all(part.done for part in self._parts)

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it is durable in every tier; false when the time runs out."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        durable = True
        for part in self._parts:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            durable = part.wait(left) and durable
        return durable
