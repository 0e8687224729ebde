"""``tiered``: this package's policies, the real classes, on modelled tiers.

``Admission``, ``DailyBudget``, ``HostBudget``, ``ResidentSet`` and
``CostModel`` are what a server runs; the log is ``RegionLog``. The order of the calls is that of
``integration``, for a scheduler that decides alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.budgets import DailyBudget
from sglang_tiered.policy.admission import (
    TOUCH_SLOTS,
    Admission,
    Level,
    Outcome,
    TouchMemory,
    backlog_pressure,
)
from sglang_tiered.policy.cost_model import CostModel
from sglang_tiered.policy.residents import ResidentSet
from sglang_tiered.policy.shares import HostBudget, has_room_to_load
from sglang_tiered_lab.trace.replay.radix import RadixStack, Store
from sglang_tiered_lab.trace.replay.region_log import RegionLog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered_lab.trace.replay.server import Job, Match
    from sglang_tiered_lab.trace.replay.sizes import TierSizes
    from sglang_tiered_lab.trace.replay.timing import Hardware
    from sglang_tiered_lab.trace.replay.totals import Totals


# As in ``integration``, which cannot be imported without SGLang; a test compares them.
STALE_AFTER_S = 3.0
PAGE_TOKENS = 64

# Costs that never change need not be learnt from every request: learning takes as long as the rest.
NUM_OBSERVED_ALL = 64
OBSERVED_OF = 16


def page_keys(units: Sequence[int]) -> list[bytes]:
    """Return keys of 16 bytes for ``TouchMemory``, which wants them mixed well."""
    numbers = np.array(units, np.uint64)
    mixed = np.empty((len(units), 2), np.uint64)
    for column, multiplier in enumerate((0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)):
        words = (numbers + np.uint64(1)) * np.uint64(multiplier)
        words ^= words >> np.uint64(29)
        words *= np.uint64(0xBF58476D1CE4E5B9)
        mixed[:, column] = words ^ (words >> np.uint64(32))
    text = mixed.tobytes()
    return [text[start : start + 16] for start in range(0, len(text), 16)]


class TieredStack(RadixStack):
    def __init__(
        self, sizes: TierSizes, hardware: Hardware, totals: Totals, *, unit_tokens: int
    ) -> None:
        super().__init__(sizes, hardware, totals, unit_tokens=unit_tokens)
        budget = HostBudget(sizes.host_tokens, sizes.device_tokens)
        self._residents: ResidentSet[int] = ResidentSet(budget.resident_tokens)
        self._resident_chains: dict[int, tuple[int, ...]] = {}
        self._window_tokens = budget.loading_tokens
        self._put_off: dict[Job, int] = {}  # tokens to load
        self._costs = CostModel(
            page_tokens=unit_tokens, bytes_per_token=hardware.kv_bytes_per_token
        )
        self._measured_at_s = 0.0
        self._waiting: dict[Job, float] = {}  # to the expected prefill
        self._waiting_s = 0.0
        # A unit of several pages takes one place for all of them, and is one page of the log.
        pages_per_unit = max(1, unit_tokens // PAGE_TOKENS)
        self._scale = pages_per_unit
        self._now_s = 0.0
        writes = None
        if sizes.writes_per_day is not None:
            writes = DailyBudget(sizes.writes_per_day, lambda: self._now_s)
        self._admission = Admission(
            budget=writes, memory=TouchMemory(max(1024, TOUCH_SLOTS // pages_per_unit))
        )
        self._log: RegionLog | None = None
        if self._has_nvme:
            self._log = RegionLog(sizes.nvme_bytes // pages_per_unit, sizes.region_bytes)
            self._below = self._log.units
        self._written = 0  # of the log, told to the budget

    # ---- NVMe ----

    def _num_held(self, units: Sequence[int], start: int) -> int:
        assert self._log is not None
        return self._log.num_leading(units, start)

    def _note_loaded(self, units: Sequence[int], num_bytes: int, seconds: float) -> None:
        return

    def _write(self, units: Sequence[int], lengths: Sequence[int]) -> None:
        assert self._log is not None
        scale, bytes_per_token = self._scale, self._bytes_per_token
        self._log.store(units, [max(1, tokens * bytes_per_token // scale) for tokens in lengths])

    def _announce(
        self,
        job: Job,
        units: Sequence[int],
        lengths: Sequence[int],
        first_new: int,
        now_s: float,
    ) -> None:
        chain_tokens = job.request.input_tokens
        # Ancestors that were dropped while the chain was short are offered again once it is long.
        wants_ancestors = self._admission.level is Level.SELECTIVE and self._admission.is_long(
            chain_tokens
        )
        if wants_ancestors and first_new and units[first_new - 1] not in self._below:
            num_tokens = self._tokens_between(job, 0, first_new)
            ancestors = Store(
                now_s, units[:first_new], lengths[:first_new], chain_tokens, num_tokens
            )
            self._queue(ancestors)
        super()._announce(job, units, lengths, first_new, now_s)

    def _admitted(self, store: Store, now_s: float) -> int:
        assert self._log is not None
        self._now_s = now_s  # of the budget's clock
        written = self._log.bytes_written
        self._admission.spend((written - self._written) * self._scale)
        self._written = written
        pinned_share = (self._store_tokens - store.num_tokens) / self._host_capacity
        return self._admission.decide(
            page_keys(store.units),
            prefix_tokens=store.chain_tokens,
            page_bytes=self._unit_tokens * self._bytes_per_token,
            num_held=lambda: self._num_held(store.units, 0),
            backlog=backlog_pressure(now_s - store.announced_s, pinned_share),
        )

    # ---- Loads ----

    def arrive(self, job: Job, now_s: float) -> None:
        super().arrive(job, now_s)
        if job not in self._waiting:
            self._enter_queue(job, self._num_in_memory(job.request.units), 0)

    def _enter_queue(self, job: Job, start: int, num_loaded: int) -> None:
        """Others that come may count on this prefill while they load."""
        before = self._tokens_between(job, 0, start + num_loaded)
        seconds = self._costs.prefill.seconds(job.request.input_tokens - before, before)
        self._waiting[job] = seconds
        self._waiting_s += seconds

    def _leave_queue(self, job: Job) -> None:
        self._waiting_s -= self._waiting.pop(job, 0.0)
        if not self._waiting:
            self._waiting_s = 0.0

    def _plan(self, job: Job, start: int, num_held: int, now_s: float) -> None:
        self._leave_queue(job)
        totals, unit_tokens = self._totals, self._unit_tokens
        before = start * unit_tokens
        stop = start + num_held
        held_tokens = self._tokens_between(job, start, stop)
        is_whole = stop == len(job.request.units)
        plan = self._costs.plan(
            num_held=num_held * unit_tokens,
            num_new=num_held * unit_tokens if is_whole else job.request.input_tokens - before,
            num_before=before,
            ahead=(self._num_ahead(now_s),),
            queue_wait_s=self._waiting_s,
        )
        num_units = plan.num_tokens // unit_tokens
        self._enter_queue(job, start, num_units)
        if num_units < num_held:
            if num_units:
                totals.loads_truncated += 1
            else:
                totals.loads_declined += 1
            self._probe(now_s)
        if not num_units:
            return
        stop = start + num_units
        num_tokens = min(held_tokens, plan.num_tokens)
        if not has_room_to_load(self._window_tokens, num_tokens, self._loading_tokens):
            if job not in self._put_off:
                totals.loads_put_off += 1
                self.num_put_off += 1
            self._put_off[job] = num_tokens
            job.load_start, job.load_stop = start, start  # nothing yet
            job.ready_s = float("inf")
            return
        self._load(job, start, stop, now_s)

    def _num_ahead(self, now_s: float) -> int:
        """Return the tokens of loads that are not done."""
        rate = self._hardware.nvme_read_bytes_per_s
        return int(self._disk.wait_s(now_s) * rate / self._bytes_per_token)

    def _probe(self, now_s: float) -> None:
        """Measure a tier that was not measured for long, before it is declined for ever."""
        if now_s - self._measured_at_s >= STALE_AFTER_S:
            num_bytes = self._unit_tokens * self._bytes_per_token
            begin_s, end_s = self._disk.load(now_s, num_bytes)
            self._measured_at_s = now_s
            self._costs.transfers[0].observe(num_bytes, end_s - begin_s)
            self._totals.nvme_bytes_loaded += num_bytes
            self._totals.nvme_bytes_wasted += num_bytes

    def _load(self, job: Job, start: int, stop: int, now_s: float) -> None:
        super()._load(job, start, stop, now_s)
        assert self._log is not None
        self._log.loaded(job.request.units[start:stop])
        transfer = self._costs.transfers[0]
        if transfer.num_observed < NUM_OBSERVED_ALL or self._totals.loads_begun % OBSERVED_OF == 0:
            num_bytes = self._tokens_between(job, start, stop) * self._bytes_per_token
            transfer.observe(num_bytes, job.load_end_s - job.load_begin_s)
        self._measured_at_s = now_s

    def poll(self, job: Job, now_s: float) -> None:
        if job in self._put_off:
            start = self._num_in_memory(job.request.units)
            missing = self._tokens_between(job, start, start + self._num_held_of(job, start))
            before = self._tokens_between(job, 0, start)
            load_s = self._costs.load_seconds((missing,), (self._num_ahead(now_s),))
            if missing and load_s < self._costs.prefill.seconds(missing, before):
                return
            self._withdraw(job)
            job.ready_s = now_s
            return
        whole_s = job.load_end_s - job.load_begin_s
        share = max(0.0, now_s - job.load_begin_s) / whole_s if whole_s else 1.0
        arrived = job.load_start + int(share * (job.load_stop - job.load_start))
        missing = self._tokens_between(job, arrived, job.load_stop)
        before = self._tokens_between(job, 0, arrived)
        if not self._costs.should_wait(
            num_saved=missing, num_before=before, left_s=job.load_end_s - now_s
        ):
            job.ready_s = now_s

    def _num_held_of(self, job: Job, start: int) -> int:
        units = job.request.units
        return self._num_held(units, start) if start < len(units) else 0

    def _withdraw(self, job: Job) -> None:
        if job in self._put_off:
            del self._put_off[job]
            self.num_put_off -= 1

    def retry(self, jobs: Sequence[Job], now_s: float) -> None:
        for job in jobs:
            if not self.num_put_off:
                return
            if job not in self._put_off:
                continue
            num_tokens = self._put_off[job]
            if not has_room_to_load(self._window_tokens, num_tokens, self._loading_tokens):
                return  # those behind it wait their turn
            put_off = self._totals.loads_put_off
            self._withdraw(job)
            job.ready_s = now_s
            self.arrive(job, now_s)
            if job in self._put_off:
                self._totals.loads_put_off = put_off  # still the same wait

    # ---- Host tier ----

    def _make_more_room(self) -> bool:
        chain = self._residents.evict_chain()
        if chain is None:
            return False
        self._unpin(self._resident_chains.pop(chain))
        return True

    def _note_host_evicted(self, num_tokens: int) -> None:
        self._residents.note_eviction(num_tokens)

    def _note_stored_chain(self, units: Sequence[int], num_tokens: int) -> None:
        if units:
            self._offer(units, num_tokens)

    def _note_load_back(self, units: Sequence[int], device: int, num_hits: int) -> None:
        residents, unit_tokens = self._residents, self._unit_tokens
        for position in range(num_hits - 1):
            if (
                units[position] in residents
            ):  # a longer prompt uses the resident that it begins with
                self._offer(units[: position + 1], (position + 1) * unit_tokens)
        self._offer(units[:num_hits], num_hits * unit_tokens)

    def _offer(self, units: Sequence[int], num_tokens: int) -> None:
        chain = units[-1]
        offer = self._residents.offer_chain(chain, num_tokens)
        for dismissed in offer.dismissed:
            self._unpin(self._resident_chains.pop(dismissed))
        if offer.accepted:
            kept = tuple(units)
            if self._pin(kept):
                self._resident_chains[chain] = kept
            else:  # a part of it is on the device only: nothing to keep
                self._resident_chains[chain] = ()

    def _note_prefill(self, new: int, before: int) -> None:
        prefill = self._costs.prefill
        if prefill.num_observed < NUM_OBSERVED_ALL or self._totals.num_requests % OBSERVED_OF == 0:
            new = max(1, new)
            prefill.observe([(new, before)], self._hardware.prefill_s(new, before))

    def begin(self, job: Job, now_s: float) -> Match:
        self._leave_queue(job)
        return super().begin(job, now_s)

    def close(self) -> None:
        super().close()
        if self._log is not None:
            totals, log, scale = self._totals, self._log, self._scale
            totals.nvme_bytes_stored += log.bytes_stored * scale
            totals.nvme_bytes_reinserted += log.bytes_reinserted * scale
            totals.nvme_bytes_written += log.bytes_written * scale
        for outcome, count in self._admission.outcomes.items():
            if outcome is not Outcome.ADMITTED and count:
                name = outcome.value.removeprefix("dropped_")
                dropped = self._totals.units_dropped
                dropped[name] = dropped.get(name, 0) + count

    def check_integrity(self) -> None:
        super().check_integrity()
        self._residents.check_integrity()
        assert self._residents.num_tokens >= 0
        assert set(self._resident_chains) == {
            c for c in self._resident_chains if c in self._residents
        }
        if self._log is not None:
            self._log.check_integrity()
