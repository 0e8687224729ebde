"""``Forgetting``: a purge under way in one tier, whatever the tier is made of."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from sglang_tiered.storage.base import Job

__all__ = ["Forgetting"]


class Order(Protocol):
    """What makes a purge durable. ``durable`` is valid once ``done``."""

    done: threading.Event
    durable: bool


class Forgetting:
    """A purge that was begun: its pages are hidden."""

    def __init__(self, order: Order | None, jobs: Sequence[Job] = ()) -> None:
        self._order = order
        self._jobs = jobs

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._order is None or (
            self._order.done.is_set() and all(job.done for job in self._jobs)
        )

    def wait(self, timeout_s: float) -> bool:
        """Whether it is durable and nothing that concerns it is under way any more; false when the
        time runs out. Not on the scheduler thread, unless it is done."""
        order = self._order
        if order is None:
            return False
        deadline = time.monotonic() + timeout_s

        def left() -> float:
            return max(deadline - time.monotonic(), 0.0)

        return all(job.wait(left()) for job in self._jobs) and (
            order.done.wait(left()) and order.durable
        )
