"""``LayeredForgetting``: one purge of two tiers. ``LateForgetting``: one that cannot begin yet."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_tiered.storage.stack.tiers import Unfinished

__all__ = ["LateForgetting", "LayeredForgetting"]


class LayeredForgetting:
    """Begun in every tier: nothing of it is a hit any more."""

    def __init__(self, *parts: Unfinished) -> None:
        self._parts = parts

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return all(part.done for part in self._parts)

    def wait(self, timeout_s: float) -> bool:
        """Whether it is durable in every tier; false when the time runs out."""
        deadline = time.monotonic() + timeout_s
        durable = True
        for part in self._parts:
            durable = part.wait(max(0.0, deadline - time.monotonic())) and durable
        return durable


class LateForgetting:
    """A purge that waits for whoever can begin it. Any thread."""

    def __init__(self) -> None:
        self._begun: Unfinished | None = None
        self._has_begun = threading.Event()

    def begin(self, purge: Unfinished) -> None:
        """``purge`` was begun."""
        self._begun = purge
        self._has_begun.set()

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._begun is not None and self._begun.done

    def wait(self, timeout_s: float) -> bool:
        """Whether it is durable; false when the time runs out."""
        begun = time.monotonic()
        if not self._has_begun.wait(timeout_s):
            return False
        assert self._begun is not None
        spent = time.monotonic() - begun
        return self._begun.wait(max(0.0, timeout_s - spent))
