"""``lru``: every tier a textbook cache of whole units, and the cache all other policies know."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from sglang_tiered_lab.trace.replay.disk import Disk
from sglang_tiered_lab.trace.replay.server import Match

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sglang_tiered_lab.trace.replay.server import Job
    from sglang_tiered_lab.trace.replay.sizes import TierSizes
    from sglang_tiered_lab.trace.replay.timing import Hardware
    from sglang_tiered_lab.trace.replay.totals import Totals


def lengths_of(num_units: int, input_tokens: int, unit_tokens: int) -> list[int]:
    """Return the tokens of each unit of a prompt; only the last may be filled in part."""
    if not num_units:
        return []
    lengths = [unit_tokens] * num_units
    lengths[-1] = input_tokens - (num_units - 1) * unit_tokens
    return lengths


class LruTier:
    """Keeps units with their tokens, least recently used first to go. About 180 bytes per unit."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.units: OrderedDict[int, int] = OrderedDict()  # to tokens
        self.tokens = 0
        self.tokens_in = 0
        self.tokens_out = 0

    def touch(self, units: Iterable[int], lengths: Iterable[int]) -> int:
        """Make these the most recent ones, in this order, and enter what is new; returns the
        tokens of that. The tier may then hold too much: ``trim`` it."""
        held = self.units
        new_tokens = 0
        for unit, tokens in zip(units, lengths, strict=True):
            if unit in held:
                held.move_to_end(unit)
            else:
                held[unit] = tokens
                new_tokens += tokens
        self.tokens += new_tokens
        self.tokens_in += new_tokens
        return new_tokens

    def trim(self) -> list[int]:
        """Evict down to the capacity; returns what went."""
        gone: list[int] = []
        held = self.units
        while self.tokens > self.capacity_tokens:
            unit, tokens = held.popitem(last=False)
            self.tokens -= tokens
            self.tokens_out += tokens
            gone.append(unit)
        return gone

    def check_integrity(self) -> None:
        held = sum(self.units.values())
        assert held == self.tokens, (held, self.tokens)
        assert self.tokens_in == self.tokens + self.tokens_out, (self.tokens_in, self.tokens_out)
        assert self.tokens <= self.capacity_tokens, (self.tokens, self.capacity_tokens)


class LruStack:
    """Three caches side by side, each touched by every request; what a tier lacks it is given, at
    no cost but the bytes. Nothing is declined, and stores take no time."""

    num_put_off = 0

    def __init__(
        self, sizes: TierSizes, hardware: Hardware, totals: Totals, *, unit_tokens: int
    ) -> None:
        self._device = LruTier(sizes.device_tokens)
        self._host = LruTier(sizes.host_tokens)
        self._nvme = LruTier(sizes.nvme_tokens)
        self._disk = Disk(hardware)
        self._totals = totals
        self._unit_tokens = unit_tokens
        self._bytes_per_token = hardware.kv_bytes_per_token

    def arrive(self, job: Job, now_s: float) -> None:
        units = job.request.units
        device, host, nvme = self._device.units, self._host.units, self._nvme.units
        start = 0
        for unit in units:
            if unit not in device and unit not in host:
                break
            start += 1
        stop = start
        while stop < len(units) and units[stop] in nvme:
            stop += 1
        if stop == start:
            return
        tokens = min(stop * self._unit_tokens, job.request.input_tokens) - start * self._unit_tokens
        num_bytes = tokens * self._bytes_per_token
        job.load_start, job.load_stop = start, stop
        job.load_begin_s, job.load_end_s = self._disk.load(now_s, num_bytes)
        job.ready_s = job.load_end_s
        self._totals.loads_begun += 1
        self._totals.nvme_bytes_loaded += num_bytes

    def poll(self, job: Job, now_s: float) -> None:
        return

    def begin(self, job: Job, now_s: float) -> Match:
        device, host = self._device.units, self._host.units
        served = [0, 0, 0]
        for position, unit in enumerate(job.request.units):
            if unit in device:
                served[0] += 1
            elif unit in host:
                served[1] += 1
            elif job.load_start <= position < job.load_stop:
                served[2] += 1
            else:
                break
        return Match(*served)

    def finish(self, job: Job, now_s: float) -> None:
        request = job.request
        units = request.units
        lengths = lengths_of(len(units), request.input_tokens, self._unit_tokens)
        new = [
            tier.touch(units, lengths) if tier.capacity_tokens else 0
            for tier in (self._device, self._host, self._nvme)
        ]
        for tier in (self._device, self._host, self._nvme):
            tier.trim()
        totals = self._totals
        totals.host_bytes_stored += new[1] * self._bytes_per_token
        totals.nvme_bytes_stored += new[2] * self._bytes_per_token
        totals.nvme_bytes_written += new[2] * self._bytes_per_token

    def retry(self, jobs: Sequence[Job], now_s: float) -> None:
        raise AssertionError("nothing is put off")

    def close(self) -> None:
        return

    def check_integrity(self) -> None:
        for tier in (self._device, self._host, self._nvme):
            tier.check_integrity()
