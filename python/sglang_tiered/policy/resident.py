"""Which host copies stay when more comes back from storage than the host tier holds.

Least-recently-used order serves nothing once the conversations that return in turn exceed the
tier: each is evicted just before it is wanted (thrashing). The classic remedy keeps a part of the
cache out of the rotation, so that this part at least is hit every time (adaptive insertion,
Qureshi et al., ISCA 2007, doi 10.1145/1250662.1250709). ``ResidentSet`` is that part: the first
chains to fill it stay until they go unused while the rest of the tier turns over many times.

Pure bookkeeping: the caller pins and unpins. Not thread-safe. Sizes are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["ResidentSet"]

Chain = TypeVar("Chain")

MAX_IDLE_TURNOVERS = 16
"""An unused resident leaves after evictions amounting to this many times the host tier."""


@dataclass(slots=True)
class _Resident:
    num_tokens: int
    last_used: int  # evicted tokens, of all time, when it was last used


class ResidentSet(Generic[Chain]):
    """Chains that stay in the host tier, at most ``capacity`` tokens of them."""

    def __init__(self, *, capacity: int, tier_tokens: int) -> None:
        if not 0 < capacity <= tier_tokens:
            raise ValueError(f"a resident set of {capacity} tokens in a tier of {tier_tokens}")
        self._capacity = capacity
        self._max_idle = MAX_IDLE_TURNOVERS * tier_tokens
        self._residents: dict[Chain, _Resident] = {}  # least recently used first
        self._num_tokens = 0
        self._evicted = 0

    def __contains__(self, chain: Chain) -> bool:
        return chain in self._residents

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def offer(self, chain: Chain, num_tokens: int) -> bool:
        """A chain has come to the host tier; true when it becomes a resident (pin it)."""
        if chain in self._residents or num_tokens > self._capacity - self._num_tokens:
            return False
        self._residents[chain] = _Resident(num_tokens, self._evicted)
        self._num_tokens += num_tokens
        return True

    def use(self, chain: Chain) -> None:
        """A request used the chain. Chains that are no residents are fine."""
        resident = self._residents.pop(chain, None)
        if resident is not None:
            resident.last_used = self._evicted
            self._residents[chain] = resident

    def evicted(self, num_tokens: int) -> list[Chain]:
        """The tier evicted others; returns residents that went unused too long (unpin them)."""
        self._evicted += num_tokens
        idle = []
        for chain, resident in self._residents.items():
            if self._evicted - resident.last_used <= self._max_idle:
                break
            idle.append(chain)
        for chain in idle:
            self._remove(chain)
        return idle

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
