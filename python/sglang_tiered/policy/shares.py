"""Who may take how much of what several want: of a scheduler's host tier (``HostBudget``), and of
the NVMe that the servers of a machine share. Pure.

Of the host tier what it holds beyond device memory is shared out, since a prefix on the device
keeps its host copy. Of that loads may fill one half, residents keep one third, and nodes that wait
for their store pin one sixth. So running requests find at least a sixth for what they write.

Of NVMe there is one LRU over all servers, with a floor for each. What nobody has is taken first,
then what a member that is closed left above its floor, then what a live one has and does not use.
Only then another loses pages: the one whose coldest were unused for the longest, and longer than
the taker's own by more than chance. Floors are nobody's but their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


LOADING_SHARE = 1 / 2
RESIDENT_SHARE = 1 / 3
PIN_SHARE = 1 / 6

HINT_SHARE = 1 / 2
"""The share that may be loaded because a conversation is about to be used, until it is."""

MIN_OWN_SHARE = 1 / 4
"""The least that is shared out, of the whole host tier, where device memory leaves less."""


_COLDER = 1.5  # than the taker's own coldest, or two that are equally busy would trade
_COLDER_S = 3.0


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


def has_room_to_load(limit: int, num_tokens: int, num_taken: int) -> bool:
    """Return whether ``num_tokens`` may be loaded beside ``num_taken`` tokens under way, of
    ``limit`` in all. One load always may, however large: a prompt longer than the limit must not
    wait forever. A request that loads nothing waits for no load either."""
    return num_tokens == 0 or num_taken == 0 or num_taken + num_tokens <= limit


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
