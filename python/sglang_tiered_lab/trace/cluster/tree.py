"""What of a modelled server's memory goes together: whole nodes of its radix tree.

A prompt's new end becomes a node; where a later prompt parts from it, or ends, it is split.
Memory evicts nodes, not single blocks, so of a prompt that is evicted in part the same part is
gone from the device as in SGLang.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from sglang_tiered.policy.residents import ResidentSet
from sglang_tiered.policy.shares import HostBudget
from sglang_tiered_lab.trace.replay.lru import LruTier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


SMALL_RATIO = 5 / 4  # as in ``integration``: below this multiple of the device it keeps nothing


class Nodes:
    """The nodes of one server, by the blocks in them, from the first to the last of each."""

    def __init__(self) -> None:
        self._of: dict[int, list[int]] = {}

    def of(self, unit: int) -> list[int]:
        """Return the blocks of a block's node."""
        return self._of[unit]

    def note_match(self, units: Sequence[int]) -> None:
        """Split the node in the middle of which a prompt ends or parts."""
        known = self._of
        last: list[int] = []
        for position, unit in enumerate(units):
            node = known.get(unit)
            if node is None:
                self._split(last, units[position - 1] if position else unit)
                return
            last = node
        if units:
            self._split(last, units[-1])

    def _split(self, node: list[int], end: int) -> None:
        """Keep the blocks up to and with ``end`` in a node; the others get one of their own."""
        if node and node[-1] != end:
            cut = node.index(end) + 1
            rest = node[cut:]
            del node[cut:]
            for unit in rest:
                self._of[unit] = rest

    def add(self, units: Sequence[int]) -> None:
        """Enter a prompt: its blocks that are new become a node."""
        self.note_match(units)
        new = [unit for unit in units if unit not in self._of]
        for unit in new:
            self._of[unit] = new

    def forget(self, units: Iterable[int]) -> None:
        """Forget blocks that no memory holds any more: whole nodes."""
        for unit in units:
            self._of.pop(unit, None)


class SharedBlocks:
    """The blocks of the tree that running requests hold. One that several hold is there once."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self.num_spared = 0  # blocks that are not there again

    def hold(self, units: Iterable[int]) -> None:
        """Note one more request that holds these."""
        for unit in units:
            holders = self._holders.get(unit, 0)
            self._holders[unit] = holders + 1
            self.num_spared += holders > 0

    def release(self, units: Iterable[int]) -> None:
        """Note one less."""
        for unit in units:
            left = self._holders.pop(unit) - 1
            if left:
                self._holders[unit] = left
                self.num_spared -= 1

    def num_held(self, units: Iterable[int]) -> int:
        """Return how many blocks at the beginning of a prompt are held already."""
        return sum(1 for _ in takewhile(self._holders.__contains__, units))


class NodeTier(LruTier):
    """Evicts whole nodes, least recently used first."""

    def __init__(self, capacity_tokens: int, nodes: Nodes) -> None:
        super().__init__(capacity_tokens)
        self._nodes = nodes

    def note_use(self, units: Iterable[int]) -> None:
        """Make those of these blocks that are here the most recently used, in this order."""
        held = self.units
        for unit in units:
            if unit in held:
                held.move_to_end(unit)

    def trim(self) -> list[int]:
        gone: list[int] = []
        while self.tokens > self.capacity_tokens and self.units:
            self._evict(next(iter(self.units)), gone)
        return gone

    def _evict(self, unit: int, gone: list[int]) -> None:
        for each in self._nodes.of(unit):
            tokens = self.units.pop(each, 0)
            if tokens:
                self.tokens -= tokens
                self.tokens_out += tokens
                gone.append(each)


class HostMemory(NodeTier):
    """Evicts the least recently used but its residents: ``ResidentSet`` is the real one, called
    as ``integration`` calls it. So of a working set that goes round and does not fit a part is hit
    every time, where plain LRU would hit nothing.

    ``device_tokens``: what the device holds, whose copies are here too. Pinned blocks that have
    become the oldest are parked, out of the way of ``trim``, with the age that they have."""

    def __init__(self, capacity_tokens: int, device_tokens: int, nodes: Nodes) -> None:
        super().__init__(capacity_tokens, nodes)
        is_small = capacity_tokens < SMALL_RATIO * device_tokens
        budget = HostBudget(capacity_tokens, device_tokens, is_small)
        self._residents: ResidentSet[int] = ResidentSet(budget.resident_tokens)
        self._chains: dict[int, tuple[int, ...]] = {}
        self._pins: dict[int, int] = {}
        self._parked: dict[int, int] = {}  # to tokens, oldest first

    def __contains__(self, unit: int) -> bool:
        return unit in self.units or unit in self._parked

    def touch(self, units: Iterable[int], lengths: Iterable[int]) -> int:
        return super().touch(self._unparked(units), lengths)

    def note_use(self, units: Iterable[int]) -> None:
        super().note_use(self._unparked(units))

    def _unparked(self, units: Iterable[int]) -> Iterable[int]:
        parked = self._parked
        for unit in units:
            if unit in parked:
                self.units[unit] = parked.pop(unit)
            yield unit

    def trim(self) -> list[int]:
        gone: list[int] = []
        held, pins, before = self.units, self._pins, self.tokens_out
        while self.tokens > self.capacity_tokens:
            if not held:
                chain = self._residents.evict_chain()
                if chain is None:
                    break
                self._unpin(chain)
                continue
            unit = next(iter(held))
            if unit in pins:
                self._parked[unit] = held.pop(unit)
            else:
                self._evict(unit, gone)
        self._residents.note_eviction(self.tokens_out - before)
        return gone

    def was_stored(self, units: Sequence[int], num_tokens: int) -> None:
        """Offer a chain whose last blocks were copied here now."""
        chain = units[-1]
        offer = self._residents.offer_chain(chain, num_tokens)
        for dismissed in offer.dismissed:
            self._unpin(dismissed)
        if offer.accepted:
            self._pin(units)

    def came_back(self, units: Sequence[int], lengths: Sequence[int]) -> None:
        """Note that a chain was copied to the device. A longer prompt uses the residents that it
        begins with."""
        num_tokens = 0
        for position, unit in enumerate(units, 1):
            num_tokens += lengths[position - 1]
            if position == len(units) or unit in self._residents:
                self.was_stored(units[:position], num_tokens)

    def _pin(self, units: Sequence[int]) -> None:
        self._nodes.note_match(units)
        kept = self._chains[units[-1]] = tuple(unit for unit in units if unit in self)
        for unit in kept:
            self._pins[unit] = self._pins.get(unit, 0) + 1

    def _unpin(self, chain: int) -> None:
        """Let go of a chain. What nothing else pins goes in its turn, which is as old as it was."""
        pins, parked = self._pins, self._parked
        for unit in self._chains.pop(chain):
            pins[unit] -= 1
            if not pins[unit]:
                del pins[unit]
                if unit in parked:
                    self.units[unit] = parked.pop(unit)
                    self.units.move_to_end(unit, last=False)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the books do not balance."""
        self._residents.check_integrity()
        held = sum(self.units.values()) + sum(self._parked.values())
        assert held == self.tokens <= self.capacity_tokens, (held, self.tokens)
        assert self.tokens_in == self.tokens + self.tokens_out
        assert self._parked.keys() <= self._pins.keys()
        assert all(unit in self for unit in self._pins)
