"""The device and host tiers as SGLang's hierarchical cache runs them, whatever lies below.

Write-through: what a prefill computed is copied to the host tier when it is inserted, and offered
to the tier below once it is there. The device and the host tier evict what was used least recently,
the end of a prefix before its beginning. A prefix on the device keeps its host copy; where the host
tier is full of those, a new prefix gets none, and is lost when the device evicts it. (SGLang evicts
whole nodes of its tree; here single units go.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered_lab.trace.replay.disk import Disk
from sglang_tiered_lab.trace.replay.lru import LruTier, lengths_of
from sglang_tiered_lab.trace.replay.server import Match

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from sglang_tiered_lab.trace.replay.server import Job
    from sglang_tiered_lab.trace.replay.sizes import TierSizes
    from sglang_tiered_lab.trace.replay.timing import Hardware
    from sglang_tiered_lab.trace.replay.totals import Totals


_MAX_PASSED_TOKENS = 1 << 15
"""On the device, that one eviction looks beyond, before it takes the host tier for full."""


class Store(NamedTuple):
    """New host copies on their way to NVMe: the units of one prefill, which end a chain."""

    announced_s: float
    units: Sequence[int]
    lengths: Sequence[int]  # tokens
    chain_tokens: int
    num_tokens: int


class RadixStack(ABC):
    """Subclasses say what NVMe holds, what is loaded from it and what it takes."""

    def __init__(
        self, sizes: TierSizes, hardware: Hardware, totals: Totals, *, unit_tokens: int
    ) -> None:
        self._device = LruTier(sizes.device_tokens)
        self._host = LruTier(sizes.host_tokens)
        self._hardware = hardware
        self._disk = Disk(hardware)
        self._totals = totals
        self._unit_tokens = unit_tokens
        self._bytes_per_token = hardware.kv_bytes_per_token
        self._loading_tokens = 0  # host memory of loads in flight or not yet consumed
        self._pins: dict[int, int] = {}  # host units that must stay, to their pins
        # Pinned units that have become the oldest, oldest first, to their tokens: out of the way.
        self._parked: OrderedDict[int, int] = OrderedDict()
        self._stores: deque[Store] = deque()
        self._storing: Store | None = None
        self._store_tokens = 0  # waiting or being written: their host copies must stay
        self.num_put_off = 0
        self._host_capacity = sizes.host_tokens
        self._has_nvme = sizes.nvme_tokens > 0
        self._below: Container[int] = ()  # what NVMe holds

    # ---- What a subclass decides ----

    @abstractmethod
    def _num_held(self, units: Sequence[int], start: int) -> int:
        """Count the leading units from ``start`` on that NVMe could load now."""

    @abstractmethod
    def _plan(self, job: Job, start: int, num_held: int, now_s: float) -> None:
        """Begin a load of some of them, postpone it, or compute them."""

    @abstractmethod
    def _admitted(self, store: Store, now_s: float) -> int:
        """Count the leading units of a store that NVMe takes when its turn comes."""

    @abstractmethod
    def _write(self, units: Sequence[int], lengths: Sequence[int]) -> None:
        """Enter units that were written, and count the bytes."""

    @abstractmethod
    def _note_loaded(self, units: Sequence[int], num_bytes: int, seconds: float) -> None:
        """Note how long units took to come back from NVMe."""

    def _make_more_room(self) -> bool:
        """Unpin one chain, since all else is evicted; return False if no chain is pinned."""
        return False

    def _note_host_evicted(self, num_tokens: int) -> None:
        """Note how much the host tier evicted."""
        return

    def _note_stored_chain(self, units: Sequence[int], num_tokens: int) -> None:
        """Note that a whole chain is in the host tier after a prefill."""
        return

    def _note_load_back(self, units: Sequence[int], device: int, num_hits: int) -> None:
        """Leading ``num_hits`` units come to the device, those from ``device`` on from the host."""
        return

    def _note_prefill(self, new: int, before: int) -> None:
        """Note a prefill of so many tokens."""
        return

    # ---- The stack ----

    def arrive(self, job: Job, now_s: float) -> None:
        self._drain(now_s)
        if not self._has_nvme:
            return
        units = job.request.units
        start = self._num_in_memory(units)
        if start < len(units):
            num_held = self._num_held(units, start)
            if num_held:
                self._plan(job, start, num_held, now_s)

    def _num_in_memory(self, units: Sequence[int]) -> int:
        device, host, parked = self._device.units, self._host.units, self._parked
        count = 0
        for unit in units:
            if unit not in device and unit not in host and unit not in parked:
                break
            count += 1
        return count

    def _load(self, job: Job, start: int, stop: int, now_s: float) -> None:
        """Begin a load; its host memory is taken at once."""
        tokens = self._tokens_between(job, start, stop)
        job.load_start, job.load_stop = start, stop
        num_bytes = tokens * self._bytes_per_token
        job.load_begin_s, job.load_end_s = self._disk.load(now_s, num_bytes)
        job.ready_s = job.load_end_s
        self._loading_tokens += tokens
        self._touch_host(job.request.units[:start])  # what the load goes on from must stay
        self._make_room(0)
        self._totals.loads_begun += 1
        self._totals.nvme_bytes_loaded += num_bytes

    def _tokens_between(self, job: Job, start: int, stop: int) -> int:
        unit_tokens, input_tokens = self._unit_tokens, job.request.input_tokens
        return min(stop * unit_tokens, input_tokens) - min(start * unit_tokens, input_tokens)

    def begin(self, job: Job, now_s: float) -> Match:
        self._drain(now_s)
        units = job.request.units
        loaded_stop = job.load_start
        if job.load_stop > job.load_start:
            loaded_stop = self._consume(job, now_s)
        device, host, parked = self._device.units, self._host.units, self._parked
        served = [0, 0, 0]
        for position, unit in enumerate(units):
            if unit in device:
                served[0] += 1
            elif unit in host or unit in parked:
                loaded = job.load_start <= position < loaded_stop
                served[2 if loaded else 1] += 1
            else:
                break
        hits = sum(served)
        if loaded_stop > hits:
            wasted = self._tokens_between(job, hits, loaded_stop)
            self._totals.nvme_bytes_wasted += wasted * self._bytes_per_token
        if hits > served[0]:
            self._note_load_back(units, served[0], hits)
        hit_tokens = min(hits * self._unit_tokens, job.request.input_tokens)
        self._note_prefill(job.request.input_tokens - hit_tokens, hit_tokens)
        return Match(*served)

    def _consume(self, job: Job, now_s: float) -> int:
        """Put what was loaded for a job into the host tier; returns where it ends."""
        start, stop = job.load_start, job.load_stop
        self._loading_tokens -= self._tokens_between(job, start, stop)
        if now_s < job.load_end_s:
            whole_s = job.load_end_s - job.load_begin_s
            share = max(0.0, now_s - job.load_begin_s) / whole_s
            stop = start + int(share * (stop - start))
            self._totals.loads_cut_off += 1
            wasted = self._tokens_between(job, stop, job.load_stop)
            self._totals.nvme_bytes_wasted += wasted * self._bytes_per_token
        if stop == start:
            return stop
        request = job.request
        units = request.units[start:stop]
        lengths = lengths_of(len(request.units), request.input_tokens, self._unit_tokens)
        self._enter_host(units, lengths[start:stop])
        num_bytes = self._tokens_between(job, start, stop) * self._bytes_per_token
        seconds = min(now_s, job.load_end_s) - job.load_begin_s
        self._note_loaded(units, num_bytes, seconds)
        return stop

    def finish(self, job: Job, now_s: float) -> None:
        self._drain(now_s)
        request = job.request
        units = request.units
        lengths = lengths_of(len(units), request.input_tokens, self._unit_tokens)
        self._device.touch(reversed(units), reversed(lengths))
        host, parked = self._host.units, self._parked
        first_new = len(units)
        for position, unit in enumerate(units):
            if unit not in host and unit not in parked:
                first_new = position
                break
        new_tokens = self._enter_host(units, lengths)
        if new_tokens >= 0:
            self._note_stored_chain(units, request.input_tokens)
        if new_tokens > 0:
            self._totals.host_bytes_stored += new_tokens * self._bytes_per_token
            if self._has_nvme:
                self._announce(job, units, lengths, first_new, now_s)
        self._evict_device()
        self._drain(now_s)

    def _announce(
        self,
        job: Job,
        units: Sequence[int],
        lengths: Sequence[int],
        first_new: int,
        now_s: float,
    ) -> None:
        """Queue the store of what is new in the host tier."""
        num_tokens = self._tokens_between(job, first_new, len(units))
        store = Store(
            now_s, units[first_new:], lengths[first_new:], job.request.input_tokens, num_tokens
        )
        self._queue(store)

    def _queue(self, store: Store) -> None:
        self._stores.append(store)
        self._store_tokens += store.num_tokens

    def _evict_device(self) -> None:
        host, parked, below = self._host.units, self._parked, self._below
        for unit in self._device.trim():
            if unit not in host and unit not in parked and unit not in below:
                self._totals.units_lost_unspilled += 1

    def _enter_host(self, units: Sequence[int], lengths: Sequence[int]) -> int:
        """Touch the units in the host tier and enter those it lacks, if there is room for them;
        returns the new tokens, -1 if there was none."""
        host, parked = self._host.units, self._parked
        new = [
            (unit, tokens)
            for unit, tokens in zip(units, lengths, strict=True)
            if unit not in host and unit not in parked
        ]
        # What is here already first, so that making room cannot take it.
        self._touch_host(units)
        if not new:
            return 0
        new_tokens = sum(tokens for _, tokens in new)
        if not self._make_room(new_tokens):
            return -1
        if len(new) == len(units):
            self._host.touch(reversed(units), reversed(lengths))
        else:
            self._host.tokens += new_tokens
            self._host.tokens_in += new_tokens
            host.update(new)
            self._touch_host(units)
        return new_tokens

    def _touch_host(self, units: Sequence[int]) -> None:
        """Make those of a chain that are in the host tier the most recent, its end before its
        beginning."""
        host, parked = self._host.units, self._parked
        for unit in reversed(units):
            if unit in host:
                host.move_to_end(unit)
            elif unit in parked:
                host[unit] = parked.pop(unit)

    def _make_room(self, num_tokens: int) -> bool:
        """Evict from the host tier until so much fits beside all else; false when it cannot."""
        tier, device, below = self._host, self._device.units, self._below
        units, pins = tier.units, self._pins
        wanted = self._loading_tokens + num_tokens
        evicted = passed_tokens = num_lost = 0
        while tier.tokens + wanted > self._host_capacity:
            unit = next(iter(units), None)
            if unit is not None and unit in pins:
                self._parked[unit] = units.pop(unit)
                continue
            if unit is not None and unit in device and passed_tokens < _MAX_PASSED_TOKENS:
                units.move_to_end(unit)  # in use, so it is not as old as it looks
                passed_tokens += units[unit]
                continue
            if unit is None or unit in device or tier.tokens <= self._store_tokens:
                if not self._make_more_room():
                    break
                passed_tokens = 0
                continue
            tokens = units.pop(unit)
            tier.tokens -= tokens
            tier.tokens_out += tokens
            evicted += tokens
            if unit not in below:
                num_lost += 1
        if evicted:
            self._totals.units_lost_unstored += num_lost
            self._note_host_evicted(evicted)
        return tier.tokens + wanted <= self._host_capacity

    def _pin(self, units: Sequence[int]) -> bool:
        """Keep a chain in the host tier; false if a part of it is not there."""
        host, parked, pins = self._host.units, self._parked, self._pins
        if any(unit not in host and unit not in parked for unit in units):
            return False
        for unit in units:
            pins[unit] = pins.get(unit, 0) + 1
        return True

    def _unpin(self, units: Sequence[int]) -> None:
        """Undo one ``_pin``. What nothing else pins goes in its turn, which is as old as it was."""
        host, parked, pins = self._host.units, self._parked, self._pins
        for unit in units:
            pins[unit] -= 1
            if not pins[unit]:
                del pins[unit]
                if unit in parked:  # older than all that is in the order
                    host[unit] = parked.pop(unit)
                    host.move_to_end(unit, last=False)

    def _drain(self, now_s: float) -> None:
        """Carry out the stores that began or ended by now, one at a time."""
        while True:
            if self._storing is not None:
                if self._disk.store_end_s > now_s:
                    return
                store, self._storing = self._storing, None
                self._store_tokens -= store.num_tokens
                if store.units:
                    self._write(store.units, store.lengths)
            if not self._stores:
                return
            begin_s = max(self._stores[0].announced_s, self._disk.store_end_s)
            if begin_s > now_s:
                return
            self._begin_store(self._stores.popleft(), begin_s)

    def _begin_store(self, store: Store, now_s: float) -> None:
        admitted = self._admitted(store, now_s)
        units, lengths = store.units[:admitted], store.lengths[:admitted]
        self._storing = store._replace(units=units, lengths=lengths)
        num_bytes = sum(lengths) * self._bytes_per_token
        if admitted:
            self._disk.store(now_s, num_bytes)

    def poll(self, job: Job, now_s: float) -> None:
        return

    def retry(self, jobs: Sequence[Job], now_s: float) -> None:
        raise AssertionError("nothing is put off")

    def close(self) -> None:
        self._drain(float("inf"))

    def check_integrity(self) -> None:
        self._device.check_integrity()
        held = self._host.units.keys() | self._parked.keys()
        assert len(held) == len(self._host.units) + len(self._parked)
        assert self._pins.keys() <= held
        assert self._parked.keys() <= self._pins.keys()
        tokens = sum(self._host.units.values()) + sum(self._parked.values())
        assert self._host.tokens == tokens, (self._host.tokens, tokens)
        assert self._host.tokens_in == self._host.tokens + self._host.tokens_out
        used = self._host.tokens + self._loading_tokens
        assert used <= self._host_capacity, (used, self._host_capacity)
        assert self._loading_tokens >= 0
        assert self._store_tokens >= 0
