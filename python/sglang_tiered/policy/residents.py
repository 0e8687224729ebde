"""``ResidentSet``: which host copies stay when more comes back than the host tier holds.

Least-recently-used order serves nothing once the conversations that return in turn exceed the tier:
each is evicted just before it is wanted (thrashing). The classic remedy keeps a part of the cache
out of the rotation, so that this part at least is hit every time. (Adaptive insertion, Qureshi et
al., ISCA 2007, doi 10.1145/1250662.1250709.) ``ResidentSet`` is that part.

A resident's worth, per token, is how often it is used times what it costs to bring back: its cost
over the time since its last use. This is cost-aware replacement after Cao and Irani, "Cost-Aware
WWW Proxy Caching Algorithms", USITS 1997, with recency for frequency. A chain that NVMe does not
hold must be computed again, so it stays longer than one that can be loaded. A chain that returns
takes the place of residents worth less than itself; of chains never seen before, every eighth takes
the place of one that was never used. The least valuable is looked for among the ``NUM_CANDIDATES``
that were used least recently: constant work, and exact while all cost the same.

A chain's pages keep those of its beginnings too. So a chain that becomes a resident takes the place
of the residents among its beginnings, and no token of one conversation counts twice. What several
conversations begin with counts in each of them.

Pure bookkeeping: the caller pins and unpins. Not thread-safe. Sizes, and the time that passes
between two uses, are tokens: time is what the tier evicted meanwhile.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence


Chain = TypeVar("Chain")

MAX_REMEMBERED = 8192
"""The last use of so many chains is remembered after they left; about 200 bytes each."""

NEW_CHAINS_PER_TRIAL = 8

NUM_CANDIDATES = 16


@dataclass(slots=True)
class _Resident:
    num_tokens: int
    last_used: int  # evicted tokens, of all time, when it was last used
    cost: float
    was_used: bool = False  # since it became a resident
    beginnings: tuple[Any, ...] = ()  # shorter chains, whose pages it keeps


class ChainOffer(NamedTuple, Generic[Chain]):
    """Says what came of a chain that was offered."""

    accepted: bool  # pin it
    dismissed: list[Chain]  # unpin these


class ResidentSet(Generic[Chain]):
    """Keeps chains in the host tier, at most ``capacity`` tokens of them; 0 keeps no chain."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._residents: OrderedDict[Chain, _Resident] = OrderedDict()  # least recently used first
        self._last_used: OrderedDict[Chain, int] = OrderedDict()  # of all chains, likewise
        self._longer: dict[Chain, Chain] = {}  # of a chain that a resident begins with, the latest
        self.num_tokens = 0
        self._evicted = 0
        self._num_refused_new = 0

    def __contains__(self, chain: Chain) -> bool:
        return chain in self._residents

    def offer_chain(
        self,
        chain: Chain,
        num_tokens: int,
        cost: float = 1.0,
        beginnings: Sequence[Chain] = (),
    ) -> ChainOffer[Chain]:
        """Decide whether a chain stays that was used and is in the host tier now.

        ``cost`` is what a token of it costs to bring back once it is evicted, in any unit. Also
        counts as a use of a chain that is a resident already, at that cost from now on, and of the
        residents among its ``beginnings``. What a resident begins with stays as long as that does.
        """
        last_used = self._last_used.pop(chain, None)
        self._last_used[chain] = self._evicted
        while len(self._last_used) > MAX_REMEMBERED:
            self._last_used.popitem(last=False)
        resident = self._residents.get(chain)
        if resident is not None:
            resident.last_used, resident.cost, resident.was_used = self._evicted, cost, True
            self._residents.move_to_end(chain)
            return ChainOffer(False, [])
        if num_tokens > self._capacity or chain in self._longer:
            return ChainOffer(False, [])
        replaced = [each for each in beginnings if each in self._residents]
        for each in replaced:  # used now, so they are the last that make room
            self._residents[each].last_used = self._evicted
            self._residents.move_to_end(each)
        num_more = num_tokens - sum(self._residents[each].num_tokens for each in replaced)
        dismissed = self._make_room(num_more, last_used, cost)
        accepted = self.num_tokens + num_more <= self._capacity
        if accepted:
            was_used = any(self._residents[each].was_used for each in replaced)
            for each in replaced:
                self._remove(each)
            self._residents[chain] = _Resident(
                num_tokens, self._evicted, cost, was_used, tuple(beginnings)
            )
            self._longer.update(dict.fromkeys(beginnings, chain))
            self.num_tokens += num_tokens
        return ChainOffer(accepted, dismissed + replaced * accepted)

    def _make_room(self, num_tokens: int, last_used: int | None, cost: float) -> list[Chain]:
        """Dismiss residents worth less than a chain last used then, or never seen before."""
        is_trial = False
        if last_used is None and self.num_tokens + num_tokens > self._capacity:
            self._num_refused_new += 1
            is_trial = self._num_refused_new % NEW_CHAINS_PER_TRIAL == 0
        dismissed: list[Chain] = []
        while self.num_tokens + num_tokens > self._capacity:
            chain = self._least_valuable()
            resident = self._residents[chain]
            idle = self._idle(chain)
            # The lower of cost / time is worth less; products, since both times may be 0.
            is_worth_more = (
                last_used is not None and (self._evicted - last_used) * resident.cost < idle * cost
            )
            if not is_worth_more and not (is_trial and not resident.was_used):
                break
            self._remove(chain)
            dismissed.append(chain)
        return dismissed

    def _least_valuable(self) -> Chain:
        """Return the least valuable of the least recently used ones; the earliest among equals."""
        return max(
            itertools.islice(self._residents, NUM_CANDIDATES),
            key=lambda chain: self._idle(chain) / self._residents[chain].cost,
        )

    def _idle(self, chain: Chain) -> int:
        return self._evicted - self._residents[chain].last_used

    def note_eviction(self, num_tokens: int) -> None:
        """Let time pass: the tier evicted so many tokens of other chains."""
        self._evicted += num_tokens

    def evict_chain(self) -> Chain | None:
        """Dismiss the least valuable resident: the tier needs its space (unpin it)."""
        if not self._residents:
            return None
        chain = self._least_valuable()
        self._remove(chain)
        return chain

    def clear(self) -> None:
        """Drop all residents: the tier was emptied, and its pins with it."""
        self._residents.clear()
        self._longer.clear()
        self.num_tokens = 0

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the books do not balance."""
        total = sum(resident.num_tokens for resident in self._residents.values())
        assert total == self.num_tokens, (total, self.num_tokens)
        assert self.num_tokens <= self._capacity, (self.num_tokens, self._capacity)
        for beginning, chain in self._longer.items():
            assert beginning in self._residents[chain].beginnings, (beginning, chain)
            assert beginning not in self._residents, beginning

    def _remove(self, chain: Chain) -> None:
        resident = self._residents.pop(chain)
        self.num_tokens -= resident.num_tokens
        for each in resident.beginnings:
            if self._longer.get(each) == chain:
                del self._longer[each]
