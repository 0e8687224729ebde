"""Which pages of a region that goes are worth writing again. Pure; replays use it too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["most_loaded"]


def most_loaded(
    hits: npt.NDArray[Any], sizes: npt.NDArray[np.int64], max_bytes: int
) -> npt.NDArray[np.int64]:
    """Positions of the pages to save: the most loaded first as far as ``max_bytes`` reach."""
    order: npt.NDArray[np.int64] = np.argsort(hits, kind="stable")[::-1]
    return order[np.cumsum(sizes[order]) <= max_bytes]
