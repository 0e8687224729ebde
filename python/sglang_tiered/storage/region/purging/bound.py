"""``Bound``: a place in the log."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["NOWHERE", "Bound"]


class Bound(NamedTuple):
    """A place in the log: what lies before it is dead. Ordered as the log is."""

    sequence: int  # of the region
    offset: int  # of the extent within it


NOWHERE = Bound(0, 0)
