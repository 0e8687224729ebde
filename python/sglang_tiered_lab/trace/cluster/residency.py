"""Which servers hold a block of a trace, in which tier: one number of bits per block.

A prompt is matched against all servers in one walk over its blocks: servers drop out of the walk
where they hold no more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.policy.routing import Held

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


DEVICE, HOST, NVME = range(3)


def numbers(bits: int) -> Iterator[int]:
    """Yield the positions of the bits that are set."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


class Matches(NamedTuple):
    """``device``, ``memory`` and ``local`` map a server to the leading units that it holds on the
    device, there or in host memory, and in any tier of its own; servers with none are left out.
    ``peer`` and ``bucket`` count the leading units that some server's NVMe holds and lends, or
    that or a bucket."""

    device: dict[int, int]
    memory: dict[int, int]
    local: dict[int, int]
    peer: int
    bucket: int

    def held(self, num_tokens: int, unit_tokens: int) -> tuple[dict[int, Held], Held]:
        """Return what each server holds, in tokens, and what one that holds nothing can fetch."""
        known: dict[tuple[int, int, int], Held] = {}
        found: dict[int, Held] = {}
        for server, local in self.local.items():
            key = (self.device.get(server, 0), self.memory.get(server, 0), local)
            if key not in known:
                known[key] = self._held(*key, num_tokens, unit_tokens)
            found[server] = known[key]
        return found, self._held(0, 0, 0, num_tokens, unit_tokens)

    def one(self, server: int, num_tokens: int, unit_tokens: int) -> Held:
        device, memory = self.device.get(server, 0), self.memory.get(server, 0)
        return self._held(device, memory, self.local.get(server, 0), num_tokens, unit_tokens)

    def _held(self, device: int, memory: int, local: int, tokens: int, unit: int) -> Held:
        peer = max(local, self.peer)
        ends = (device, memory, local, peer, max(peer, self.bucket))
        a, b, c, d, e = (min(tokens, end * unit) for end in ends)
        return Held(a, b - a, c - b, d - c, e - d)


class Residency:
    """Holds, for every block, bits for the servers that hold it: ``count`` for the device, as many
    for host memory and for NVMe, and one for the bucket. About 150 bytes per block."""

    def __init__(self, count: int, *, has_peers: bool = True) -> None:
        self._count = count
        self._all = (1 << count) - 1
        self._bucket = 1 << 3 * count
        self._lent = self._all if has_peers else 0
        self.blocks: dict[int, int] = {}

    def bits(self, server: int, tiers: Iterable[int], bucket: bool = False) -> int:
        """Return the bits of a server's tiers, for ``add`` and ``remove``."""
        bits = sum(1 << tier * self._count + server for tier in tiers)
        return bits | (self._bucket if bucket else 0)

    def add(self, units: Iterable[int], bits: int) -> None:
        known = self.blocks
        for unit in units:
            known[unit] = known.get(unit, 0) | bits

    def remove(self, units: Iterable[int], bits: int) -> None:
        known = self.blocks
        keep = ~bits
        for unit in units:
            left = known.get(unit, 0) & keep
            if left:
                known[unit] = left
            else:
                known.pop(unit, None)

    def forget_server(self, server: int) -> None:
        self.remove(list(self.blocks), self.bits(server, (DEVICE, HOST, NVME)))

    def holders(self, unit: int) -> int:
        """Return the bits of the servers whose NVMe holds a block."""
        return (self.blocks.get(unit, 0) >> 2 * self._count) & self._all

    def match(self, units: Sequence[int], predicted: Residency | None = None) -> Matches:
        """Match a prompt against all servers. ``predicted`` is what will be held soon."""
        known, count, everyone, bucket_bit = self.blocks, self._count, self._all, self._bucket
        more = predicted.blocks if predicted is not None else {}
        ends: tuple[dict[int, int], dict[int, int], dict[int, int]] = ({}, {}, {})
        alive = [everyone, everyone, everyone]
        peer = bucket = -1
        position = 0
        for position, unit in enumerate(units):
            bits = known.get(unit, 0)
            if more:
                bits |= more.get(unit, 0)
            device = bits & everyone
            memory = device | (bits >> count) & everyone
            nvme = (bits >> 2 * count) & everyone
            lent = nvme & self._lent
            peer = position if peer < 0 and not lent else peer
            is_anywhere = lent or bits & bucket_bit
            bucket = position if bucket < 0 and not is_anywhere else bucket
            if not bits or not (alive[2] or bucket < 0):
                break
            local = memory | nvme
            if position == 0:
                alive = [device, memory, local]
                continue
            for end, tier, holding in zip(ends, range(3), (device, memory, local), strict=True):
                gone = alive[tier] & ~holding
                if gone:
                    alive[tier] ^= gone
                    for server in numbers(gone):
                        end[server] = position
        else:
            position = len(units)
        if not position:
            return Matches({}, {}, {}, max(0, peer), max(0, bucket))
        for end, left in zip(ends, alive, strict=True):
            for server in numbers(left):
                end[server] = position
        peer, bucket = (position if end < 0 else end for end in (peer, bucket))
        return Matches(ends[0], ends[1], ends[2], peer, bucket)


class Expected(Residency):
    """What devices will hold soon, as requests for it were sent there. What several of them bring
    is expected until none is left that does."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._counts: list[dict[int, int]] = [{} for _ in range(count)]

    def expect(self, server: int, units: Iterable[int]) -> None:
        """A request that brings these was sent."""
        counts, new = self._counts[server], []
        for unit in units:
            before = counts.get(unit, 0)
            counts[unit] = before + 1
            if not before:
                new.append(unit)
        self.add(new, self.bits(server, (DEVICE,)))

    def settle(self, server: int, units: Iterable[int]) -> None:
        """Nothing more is expected of one that was sent."""
        counts, gone = self._counts[server], []
        for unit in units:
            left = counts.pop(unit, 0) - 1
            if left > 0:
                counts[unit] = left
            else:
                gone.append(unit)
        self.remove(gone, self.bits(server, (DEVICE,)))

    def forget_server(self, server: int) -> None:
        super().forget_server(server)
        self._counts[server].clear()
