"""The books of host memory: what becomes of every page, and how the cleaning of pages goes.

``PageFates`` over the tensors SGLang passes around. The cache tells it what is written, loaded and
freed (scheduler thread), the storage class what is stored (backup thread).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_tiered.policy.admission import Outcome
from sglang_tiered.policy.page_accounting import Fate, PageFates

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

__all__ = ["HostLedger"]

_FATES = {
    Outcome.DROPPED_FIRST_TOUCH: Fate.LOST_FIRST_TOUCH,
    Outcome.DROPPED_BUDGET: Fate.LOST_BUDGET,
    Outcome.DROPPED_BACKLOG: Fate.LOST_BACKLOG,
}


@dataclass
class HostLedger:
    """Of the KV pool of one scheduler. ``host_indices`` are token slots of whole pages."""

    fates: PageFates
    page_size: int
    # Written by the scheduler thread.
    waiting_tokens: int = 0
    flight_tokens: int = 0
    num_backups_skipped: int = 0
    num_backups_recovered: int = 0

    @classmethod
    def of_pool(cls, num_tokens: int, page_size: int) -> HostLedger:
        """Over a host pool of that many token slots."""
        return cls(PageFates(num_tokens // page_size), page_size)

    def _pages(self, host_indices: torch.Tensor) -> NDArray[np.int64]:
        pages: NDArray[np.int64] = (host_indices[:: self.page_size] // self.page_size).numpy()
        return pages

    def written(self, host_indices: torch.Tensor) -> None:
        """Device memory is copied to these slots."""
        self.fates.written(self._pages(host_indices))

    def loaded(self, host_indices: torch.Tensor) -> None:
        """These slots were filled from NVMe and belong to the tree now."""
        self.fates.loaded(self._pages(host_indices))

    def freed(self, host_indices: torch.Tensor) -> None:
        """The tree gave these slots up."""
        self.fates.freed(self._pages(host_indices))

    def never_written(self, num_tokens: int) -> None:
        """Device memory gave up KV that has no host copy."""
        self.fates.never_written(num_tokens // self.page_size)

    def flushed(self) -> None:
        """The tree was emptied."""
        self.fates.flushed()

    def stored(
        self, host_indices: torch.Tensor, ok: Sequence[bool], num_admitted: int, why: Outcome | None
    ) -> None:
        """What a store made of its pages, of which admission let the leading ones in; ``why`` is
        None where stores were refused, since the pages are of weights that were replaced."""
        fates = [Fate.CLEAN if is_ok else Fate.LOST_FAILED for is_ok in ok[:num_admitted]]
        dropped_as = Fate.LOST_WEIGHTS if why is None else _FATES.get(why, Fate.LOST_FAILED)
        fates += [dropped_as] * (len(ok) - num_admitted)
        self.fates.stored(self._pages(host_indices), fates)
