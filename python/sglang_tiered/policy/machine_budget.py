"""Who of the servers on a machine may take how much of the NVMe that they share: one LRU over all
of them, with a floor for each. Pure.

What nobody has is taken first, then what a member that is closed left above its floor, then what a
live one has and does not use. Only then another loses pages: the one whose coldest were unused for
the longest, and longer than the taker's own by more than chance. Floors are nobody's but their
own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["StoreShare", "grant", "recall"]

_COLDER = 1.5  # than the taker's own coldest, or two that are equally busy would trade
_COLDER_S = 3.0


class StoreShare(NamedTuple):
    """One store. ``due_bytes``: it was asked to come down to that. ``keeps_bytes``: it cannot come
    below that now. ``wants_bytes``: as it is written to, it would like so much free.
    ``coldest_s``: how long what it would evict next was not used."""

    floor_bytes: int
    cap_bytes: int
    due_bytes: int
    held_bytes: int = 0
    keeps_bytes: int = 0
    wants_bytes: int = 0
    coldest_s: float = math.inf
    is_live: bool = True

    @property
    def reserved_bytes(self) -> int:
        """Return what is no other's: a floor is, also where it is not used."""
        return max(self.floor_bytes, self.cap_bytes)

    @property
    def asked_bytes(self) -> int:
        """Return what it would take now: up to its floor without reason."""
        free = max(self.cap_bytes - self.held_bytes, 0)
        return max(self.wants_bytes - free, self.floor_bytes - self.cap_bytes, 0)

    @property
    def colder_s(self) -> float:
        """Return what the coldest pages of another are older than that it takes."""
        if self.cap_bytes < self.floor_bytes:
            return -1.0
        return self.coldest_s * _COLDER + _COLDER_S

    @property
    def pending_bytes(self) -> int:
        """Return what it was asked for, and still has."""
        return max(self.cap_bytes - max(self.due_bytes, self.floor_bytes), 0)

    def left_bytes(self, least_bytes: int = 0) -> int:
        """Return what may be asked of it, that leaves it so much."""
        least = max(self.floor_bytes, self.keeps_bytes, least_bytes)
        return max(min(self.due_bytes, self.cap_bytes) - least, 0)


def _room(total_bytes: int, members: Mapping[str, StoreShare], name: str) -> int:
    """Return what a member may have beyond its cap; negative while what others have is in the way
    of its floor, or of that of another."""
    others = sum(each.reserved_bytes for other, each in members.items() if other != name)
    return total_bytes - others - members[name].cap_bytes


def grant(total_bytes: int, members: Mapping[str, StoreShare], name: str) -> int:
    """Return how much a member may take now. What it would have above its floor is first of those
    whose coldest pages are younger, or what it gave would be its own again."""
    mine = members[name]
    if mine.pending_bytes:
        return 0
    there = _room(total_bytes, members, name)
    others = (each for other, each in members.items() if other != name and each.is_live)
    first = sum(each.asked_bytes for each in others if each.coldest_s < mine.coldest_s)
    below = max(mine.floor_bytes - mine.cap_bytes, 0)
    return max(min(mine.asked_bytes, there, max(there - first, below)), 0)


def recall(total_bytes: int, members: Mapping[str, StoreShare], name: str) -> dict[str, int]:
    """Return to what others must come down for a member, by name. What was asked before is on its
    way, whoever it is for."""
    mine = members[name]
    is_below = mine.cap_bytes < mine.floor_bytes
    there = _room(total_bytes, members, name)
    asked = {other: each for other, each in members.items() if other != name}
    needed = mine.asked_bytes - (there if is_below else max(there, 0))
    needed -= sum(each.pending_bytes for each in asked.values() if each.is_live)
    if mine.pending_bytes or needed <= 0:
        return {}
    closed = [other for other, each in asked.items() if not each.is_live]
    live = sorted(asked.keys() - closed, key=lambda other: -asked[other].coldest_s)
    unused = [(other, asked[other].held_bytes) for other in live if not asked[other].wants_bytes]
    cold = [(other, 0) for other in live if asked[other].coldest_s > mine.colder_s]
    dues: dict[str, int] = {}
    for other, least in (*((other, 0) for other in closed), *unused, *cold):
        given = min(asked[other].left_bytes(least), needed)
        if given > 0:
            due = min(asked[other].due_bytes, asked[other].cap_bytes) - given
            asked[other] = asked[other]._replace(due_bytes=due)
            dues[other] = due
            needed -= given
    return dues
