"""Which host copies stay when more comes back from storage than the host tier holds.

Least-recently-used order serves nothing once the conversations that return in turn exceed the
tier: each is evicted just before it is wanted (thrashing). The classic remedy keeps a part of the
cache out of the rotation, so that this part at least is hit every time (adaptive insertion,
Qureshi et al., ISCA 2007, doi 10.1145/1250662.1250709). ``ResidentSet`` is that part. A chain that
returns takes the place of one that has been idle for longer than the returning chain was away; of
chains never seen before, every eighth takes the place of one that was never used.

Pure bookkeeping: the caller pins and unpins. Not thread-safe. Sizes, and the time that passes
between two uses, are tokens: time is what the tier evicted meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Offer", "ResidentSet"]

Chain = TypeVar("Chain")

MAX_REMEMBERED = 8192
"""Chains whose last use is remembered after they left the tier; about 200 bytes each."""

NEW_CHAINS_PER_TRIAL = 8


@dataclass(slots=True)
class _Resident:
    num_tokens: int
    last_used: int  # evicted tokens, of all time, when it was last used
    was_used: bool = False  # since it became a resident


class Offer(NamedTuple, Generic[Chain]):
    """What came of a chain that was offered."""

    accepted: bool  # pin it
    dismissed: list[Chain]  # unpin these


class ResidentSet(Generic[Chain]):
    """Chains that stay in the host tier, at most ``capacity`` tokens of them."""

    def __init__(self, capacity: int) -> None:
        if capacity <= 0:
            raise ValueError(f"a resident set of {capacity} tokens keeps nothing")
        self._capacity = capacity
        self._residents: OrderedDict[Chain, _Resident] = OrderedDict()  # least recently used first
        self._last_used: OrderedDict[Chain, int] = OrderedDict()  # of all chains, likewise
        self._num_tokens = 0
        self._evicted = 0
        self._num_refused_new = 0

    def __contains__(self, chain: Chain) -> bool:
        return chain in self._residents

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def offer(self, chain: Chain, num_tokens: int) -> Offer[Chain]:
        """A chain was used and is in the host tier now; decide whether it stays.

        Also counts as a use of a chain that is a resident already.
        """
        last_used = self._last_used.pop(chain, None)
        self._last_used[chain] = self._evicted
        while len(self._last_used) > MAX_REMEMBERED:
            self._last_used.popitem(last=False)
        resident = self._residents.get(chain)
        if resident is not None:
            resident.last_used, resident.was_used = self._evicted, True
            self._residents.move_to_end(chain)
            return Offer(False, [])
        if num_tokens > self._capacity:
            return Offer(False, [])
        dismissed = self._make_room(num_tokens, last_used)
        accepted = self._num_tokens + num_tokens <= self._capacity
        if accepted:
            self._residents[chain] = _Resident(num_tokens, self._evicted)
            self._num_tokens += num_tokens
        return Offer(accepted, dismissed)

    def _make_room(self, num_tokens: int, last_used: int | None) -> list[Chain]:
        """Dismiss residents worth less than a chain last used then, or never seen before."""
        is_trial = False
        if last_used is None and self._num_tokens + num_tokens > self._capacity:
            self._num_refused_new += 1
            is_trial = self._num_refused_new % NEW_CHAINS_PER_TRIAL == 0
        dismissed: list[Chain] = []
        while self._num_tokens + num_tokens > self._capacity:
            chain, resident = next(iter(self._residents.items()))
            idle_longer = last_used is not None and resident.last_used < last_used
            if not idle_longer and not (is_trial and not resident.was_used):
                break
            self._remove(chain)
            dismissed.append(chain)
        return dismissed

    def evicted(self, num_tokens: int) -> None:
        """The tier evicted others: time passed."""
        self._evicted += num_tokens

    def give_up(self) -> Chain | None:
        """Dismiss the least recently used resident: the tier needs its space (unpin it)."""
        chain = next(iter(self._residents), None)
        if chain is not None:
            self._remove(chain)
        return chain

    def clear(self) -> None:
        """The tier was emptied; nothing is pinned any more."""
        self._residents.clear()
        self._num_tokens = 0

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the books do not balance."""
        total = sum(resident.num_tokens for resident in self._residents.values())
        assert total == self._num_tokens, (total, self._num_tokens)
        assert self._num_tokens <= self._capacity, (self._num_tokens, self._capacity)

    def _remove(self, chain: Chain) -> None:
        self._num_tokens -= self._residents.pop(chain).num_tokens
