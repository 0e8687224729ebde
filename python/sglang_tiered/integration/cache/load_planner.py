"""``LoadPlanner``: feeds the cost model of one scheduler, and follows its plans to their end.

The scheduler asks three things: how much of a prefix to load when a request arrives, whether a
request that was put off still gains by its turn, and, while a load runs, whether to wait on. All
three come from the same learnt costs: of computing, and of loads from each tier. Loads finish on
storage threads and are only noted there; everything else runs on the scheduler thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from sglang_tiered.integration.observe.stats import PlannerStats, TierReads
from sglang_tiered.policy.cost_model import (
    TYPICAL_TRANSFER_BYTES,
    LoadDecision,
    LoadPlan,
    remote_first,
)
from sglang_tiered.storage.base import Tier
from sglang_tiered.storage.stack.tiers import REMOTE_TIERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.policy.cost_model import CostModel, TransferCost

__all__ = ["InFlightRead", "LoadPlanner", "TierTiming"]

Request = TypeVar("Request")

STALE_AFTER_S = {Tier.NVME: 3.0, Tier.PEER: 10.0, Tier.OBJECT: 60.0}
"""A tier that no load has measured for this long is probed before it is declined for ever: disks
recover. A probe of another server takes some of its time; one of a bucket costs money."""

MIN_FAR_DEADLINE_S = 0.05

TIERS = tuple(Tier)
"""The index of a tier is its number in the cost model."""

PREFILL_UNITS = ("batch", "token", "pair", "copied_token")
LOAD_UNITS = ("load", "byte")
"""What the prices of prefill and of loads are of."""

YIELD_SHARE = 0.05
"""Of its own prefill, what a request waits so that a load that is nearly done gets into the same
batch: without it, a load that ends a moment too late waits for a whole prefill of others."""

MAX_WAITING = 100_000

MAX_WINDOWS = 1024

WINDOW_READS, WINDOW_S, MAX_WINDOW_READS = 8, 0.05, 64
"""Reads that overlap share a tier's speed in a way that is not known, so they are learnt from
together: at least so many or for so long, with all that were under way when the first of them
ended, or fewer when the tier has nothing more to read."""


@dataclass(slots=True, eq=False)
class InFlightRead:
    """Describes a read under way."""

    timing: TierTiming
    num_bytes: int
    begun_at: float


class _Window(NamedTuple):
    """Describes reads that ended, and the seconds in which the tier was at them."""

    num_read: int = 0
    bytes_read: int = 0
    num_failed: int = 0
    bytes_failed: int = 0
    seconds: float = 0.0
    is_tail: bool = False  # what it read was mostly read in the window before


class TierTiming:
    """Times the reads of one tier. ``begin`` and ``end`` run on any thread, the rest on the
    scheduler thread, which learns from what they noted."""

    def __init__(
        self, cost: TransferCost, clock: Callable[[], float], *, stale_after_s: float
    ) -> None:
        self.cost = cost
        self._clock = clock
        self._stale_after_s = stale_after_s
        self._lock = threading.Lock()
        self._in_flight: dict[InFlightRead, None] = {}
        self._since = 0.0  # when the tier began with what is in flight, or ended the last read
        self._window = _Window()
        self._left: set[InFlightRead] = set()  # under way when the first of the window ended
        self._goes_on = False  # a window ended, and the tier has not been idle since
        self._windows: deque[_Window] = deque(maxlen=MAX_WINDOWS)
        self._reported_s = 0.0
        self._measured_at = clock()
        self.num_loads = 0
        self.load_s = 0.0

    def begin(self, num_bytes: int) -> InFlightRead:
        """Note that a load (or a probe) begins to read."""
        with self._lock:
            read = InFlightRead(self, num_bytes, self._clock())
            if not self._in_flight:
                self._since, self._reported_s = read.begun_at, 0.0
            self._in_flight[read] = None
        return read

    def end(self, read: InFlightRead, *, is_complete: bool) -> None:
        """Note the end of a read: all bytes arrived, or it failed. A quick failure says nothing of
        speed; one that took long does."""
        with self._lock:
            if read not in self._in_flight:
                return  # of a storage that was detached
            del self._in_flight[read]
            self._left.discard(read)
            now, window = self._clock(), self._window
            seconds = now - self._since
            took_s = now - max(self._since, read.begun_at)
            if is_complete or took_s >= self.cost.seconds(read.num_bytes):
                self._since = now
                self._reported_s = 0.0
                if window.num_read + window.num_failed == 0:
                    self._left = set(self._in_flight)
                self._window = window = _Window(
                    window.num_read + is_complete,
                    window.bytes_read + is_complete * read.num_bytes,
                    window.num_failed + (not is_complete),
                    window.bytes_failed + (not is_complete) * read.num_bytes,
                    window.seconds + seconds,
                )
            num_ended = window.num_read + window.num_failed
            is_full = num_ended >= WINDOW_READS or window.seconds >= WINDOW_S
            is_full = (is_full and not self._left) or num_ended >= MAX_WINDOW_READS
            is_over = not self._in_flight
            if num_ended and (is_over or is_full):
                is_tail = self._goes_on and not is_full
                self._windows.append(window._replace(is_tail=is_tail))
                self._window = _Window()
            self._goes_on = not is_over and (self._goes_on or is_full)

    def forget_reads(self) -> None:
        """Forget reads under way of a storage that was detached: one may hang for ever."""
        with self._lock:
            self._in_flight.clear()
            self._left.clear()
            self._window = _Window()
            self._goes_on = False

    @property
    def bytes_per_s(self) -> float | None:
        """Return the speed of a load of typical size; None before the first load."""
        return self.cost.bytes_per_s if self.cost.num_observed else None

    def wants_probe(self) -> bool:
        """Whether the tier was not measured for long. Ask only when a load was declined."""
        if self._clock() - self._measured_at < self._stale_after_s:
            return False
        self._measured_at = self._clock()  # one at a time
        return True

    def learn(self) -> None:
        """Take in the reads that have ended, and those under way if they are late."""
        while self._windows:
            window = self._windows.popleft()
            self.num_loads += window.num_read
            self.load_s += window.seconds
            num_loads = window.num_read + window.num_failed
            num_bytes = window.bytes_read + window.bytes_failed
            if window.num_failed and window.seconds < self.cost.seconds(num_bytes, num_loads):
                num_loads, num_bytes = window.num_read, window.bytes_read
            if num_loads and not window.is_tail:
                self._observe(num_bytes, window.seconds, num_loads)
        if self._in_flight:
            self._learn_from_late()

    def _learn_from_late(self) -> None:
        """Learn from reads of which none ended in twice the time expected of all of them, and again
        each time that doubles: otherwise one request after the other would wait for a disk that
        hangs."""
        with self._lock:
            num_reads = len(self._in_flight)
            num_bytes = sum(read.num_bytes for read in self._in_flight)
            elapsed_s = self._clock() - self._since
            expected_s = self.cost.seconds(num_bytes, num_reads)
            if not num_reads or elapsed_s <= 2 * max(expected_s, self._reported_s):
                return
            self._reported_s = elapsed_s
        self._observe(num_bytes, elapsed_s, num_reads)

    def _observe(self, num_bytes: int, seconds: float, num_loads: int) -> None:
        self.cost.observe(num_bytes, seconds, num_loads)
        self._measured_at = self._clock()


@dataclass(slots=True)
class _Load:
    """Describes a load under way. Times are of the planner's clock."""

    plan: LoadPlan
    queued_at: float | None = None
    begun_at: float | None = None  # when its reads were first seen under way
    left_to_begin_s: float = 0.0


class LoadPlanner(Generic[Request]):
    """Plans the loads of one scheduler. Scheduler thread, but for ``begin_read`` and
    ``end_read``."""

    def __init__(
        self,
        costs: CostModel,
        clock: Callable[[], float] = time.monotonic,
        *,
        always: bool = False,
        always_deadline_s: float = 10.0,
        follows: bool = False,
    ) -> None:
        self.costs = costs
        self._always = always  # load everything, whatever it costs
        self.follows = follows  # plan to load everything: another rank knows what there is
        self.tokens = dict.fromkeys(LoadDecision, 0)
        self.timings = {
            tier: TierTiming(cost, clock, stale_after_s=STALE_AFTER_S[tier])
            for tier, cost in zip(TIERS, costs.transfers, strict=True)
        }
        self.far_deadline_s = always_deadline_s if always else MIN_FAR_DEADLINE_S
        self._clock = clock
        self._loads: dict[Request, _Load] = {}
        self._loading = [0] * len(TIERS)  # tokens of loads under way, by where they come from
        self._waiting: dict[Request, float] = {}
        self._waiting_s = 0.0
        self._waiting_tokens: dict[Request, int] = {}  # that they are to compute
        self.num_waiting_tokens = 0  # the sum of those
        self._yielding: dict[Request, float] = {}  # since when
        self._deadline_is_due = False

    # ---- What things take ----

    def begin_read(self, num_bytes: int, tier: Tier = Tier.NVME) -> InFlightRead:
        """Note that a load (or a probe) begins to read. Any thread; pass the result to
        ``end_read``."""
        return self.timings[tier].begin(num_bytes)

    def end_read(self, read: InFlightRead, *, is_complete: bool) -> None:
        """Note the end of a read: all bytes arrived, or it failed. Any thread."""
        read.timing.end(read, is_complete=is_complete)

    def note_batch(
        self, spans: Sequence[tuple[int, int]], seconds: float, num_copied: int = 0
    ) -> None:
        """Note how long a prefill batch of ``(new tokens, tokens before them)`` took, of which
        ``num_copied`` tokens were copied to the device meanwhile."""
        self.costs.prefill.observe(spans, seconds, num_copied)

    def wants_probe(self, tier: Tier = Tier.NVME) -> bool:
        """Whether the tier was not measured for long. Ask only when a load was declined."""
        self.learn()
        return self.timings[tier].wants_probe()

    @property
    def bytes_per_s(self) -> float | None:
        """Return the measured speed of NVMe; None before it was measured. Any thread."""
        return self.timings[Tier.NVME].bytes_per_s

    def far_order(self) -> list[Tier]:
        """Return the tiers beyond NVMe, the fastest for a typical load first. Any thread."""
        far = REMOTE_TIERS
        return sorted(far, key=lambda tier: self.timings[tier].cost.seconds(TYPICAL_TRANSFER_BYTES))

    def forget_reads(self) -> None:
        """Forget the reads under way of a storage that was detached."""
        for timing in self.timings.values():
            timing.forget_reads()

    def stats(self) -> PlannerStats:
        """Take a snapshot. Any thread."""
        prefill = self.costs.prefill
        return PlannerStats(
            load_decisions={} if self.follows else dict(self.tokens),
            prefill_tokens_per_s=prefill.tokens_per_s if prefill.num_observed else None,
            prefill_prices=dict(zip(PREFILL_UNITS, prefill.all_prices, strict=True))
            if prefill.num_observed
            else {},
            load_prices={
                (tier, unit): price
                for tier, timing in self.timings.items()
                if timing.cost.num_observed
                for unit, price in zip(LOAD_UNITS, timing.cost.prices, strict=True)
            },
            queue_wait_s=self._waiting_s,
            waiting_tokens=self.num_waiting_tokens,
            reads={
                tier: TierReads(timing.num_loads, timing.load_s, timing.bytes_per_s)
                for tier, timing in self.timings.items()
            },
        )

    def learn(self) -> None:
        """Take in what reads took; called once in every step too."""
        for timing in self.timings.values():
            timing.learn()

    def step(self) -> None:
        """Begin a step of the scheduler."""
        self.learn()
        if self._deadline_is_due:
            self._deadline_is_due = False
            self._set_deadline()

    # ---- From arrival to admission ----

    def knows(self, request: Request) -> bool:
        """Whether a request has arrived and has not left."""
        return request in self._waiting

    @property
    def queue_wait_s(self) -> float:
        """Return how long the prefill of the waiting requests is expected to take."""
        return self._waiting_s

    @property
    def num_waiting(self) -> int:
        """Return how many requests have arrived and not left."""
        return len(self._waiting)

    def tokens_ahead(self, num_ahead: int) -> tuple[int, ...]:
        """Attribute ``num_ahead`` tokens of loads under way to tiers, as a plan does."""
        return remote_first(num_ahead, self._loading)

    def arrives(
        self,
        request: Request,
        *,
        num_held: int,
        num_new: int,
        num_before: int,
        num_ahead: int,
        spans: Sequence[tuple[Tier, int]] = (),
        ends: Sequence[int] | None = None,
    ) -> int:
        """Plan the load of a request that arrived (again), with ``num_new`` tokens behind
        ``num_before`` cached ones. The tiers hold the first ``num_held`` of them, in ``spans`` of
        so many tokens (empty: NVMe holds all). A load may end after any page, or where ``ends``
        says. Returns how many tokens to load."""
        self.learn()
        is_new = not self.knows(request)
        self.leaves(request)
        plan = LoadPlan((num_held,), 0.0, 0.0)
        if not self._always and not self.follows:
            plan = self.costs.plan(
                num_held=num_held,
                num_new=num_new,
                num_before=num_before,
                ahead=remote_first(num_ahead, self._loading),
                queue_wait_s=self._waiting_s,
                spans=[(TIERS.index(tier), num_tokens) for tier, num_tokens in spans],
                ends=ends,
            )
        if plan.num_tokens:
            self._loads[request] = _Load(plan)
        if is_new:
            self.tokens[LoadDecision.ABSENT] += max(0, num_new - num_held)
            self.tokens[LoadDecision.DECLINED] += num_held - plan.num_tokens
        if len(self._waiting) < MAX_WAITING:
            rest, before = num_new - plan.num_tokens, num_before + plan.num_tokens
            self._waiting[request] = self.costs.prefill.seconds(rest, before)
            self._waiting_s += self._waiting[request]
            self._waiting_tokens[request] = rest
            self.num_waiting_tokens += rest
        return plan.num_tokens

    def leaves(self, request: Request) -> None:
        """Forget a request that was admitted or has gone. Unknown ones are ignored."""
        load = self._loads.pop(request, None)
        if load is not None and load.queued_at is not None:
            self._count(load, -1)
        self._yielding.pop(request, None)
        self._waiting_s -= self._waiting.pop(request, 0.0)
        self.num_waiting_tokens -= self._waiting_tokens.pop(request, 0)
        if not self._waiting:
            self._waiting_s = 0.0  # no rounding is left over

    def begins(self, request: Request) -> None:
        """Note that a request's load was queued."""
        load = self._loads.get(request)
        if load is not None:
            self.tokens[LoadDecision.LOAD] += load.plan.num_tokens
            if load.queued_at is None:
                self._count(load, 1)
            load.queued_at = self._clock()
            if not self._always:
                saved_s = load.plan.saved_s if load.plan.num_remote else 0.0
                self.far_deadline_s = max(self.far_deadline_s, saved_s + self._waiting_s)
                self._deadline_is_due = True

    def _set_deadline(self) -> None:
        """Bound reads of remote tiers: any of them is useless once the longest prefill that a load
        replaces would have been computed."""
        begun = (load for load in self._loads.values() if load.queued_at is not None)
        saved = [load.plan.saved_s for load in begun if load.plan.num_remote]
        longest_s = max(saved, default=0.0) + self._waiting_s
        self.far_deadline_s = max(MIN_FAR_DEADLINE_S, longest_s)

    def _count(self, load: _Load, sign: int) -> None:
        for tier, num_tokens in enumerate(load.plan.parts):
            self._loading[tier] += sign * num_tokens

    def _loading_but(self, load: _Load | None) -> list[int]:
        """Return the tokens of other loads under way, by tier."""
        others = self._loading[:]
        if load is not None and load.queued_at is not None:
            for tier, num_tokens in enumerate(load.plan.parts):
                others[tier] -= num_tokens
        return others

    def left_s(self, request: Request) -> float:
        """Return the seconds until a load is expected to end; infinite if it is far too late, or if
        there is no load."""
        load = self._loads.get(request)
        if load is None or load.queued_at is None:
            return math.inf
        left_s = load.plan.load_s - (self._clock() - load.queued_at)
        return max(left_s, 0.0) if left_s > -load.plan.load_s else math.inf

    def yields(self, request: Request, left_s: float) -> bool:
        """Whether a request that could start now lets a load of another, expected in ``left_s``,
        arrive first: for at most ``YIELD_SHARE`` of its own prefill in all."""
        patience_s = YIELD_SHARE * self._waiting.get(request, 0.0)
        if left_s > patience_s:
            return False
        now = self._clock()
        return now - self._yielding.setdefault(request, now) < patience_s

    def gains_by_its_turn(self, request: Request, *, num_ahead: int) -> bool:
        """Whether a request whose load was put off, and which could start now, should go on
        waiting for it, behind ``num_ahead`` tokens of other loads."""
        load = self._loads.get(request)
        if load is None or self._always or self.follows:
            return load is not None
        plan = load.plan
        ahead = remote_first(num_ahead, self._loading)
        return self.costs.load_seconds(plan.parts, ahead) < plan.saved_s

    def patience_s(self, request: Request) -> float:
        """Return how long a load may wait for host memory and still gain."""
        load = self._loads.get(request)
        if load is None:
            return 0.0
        gain_s = load.plan.saved_s - load.plan.load_s
        return self.far_deadline_s if self._always else max(0.0, gain_s)

    def should_wait(
        self,
        request: Request,
        *,
        num_missing: int,
        num_before: int,
        num_ahead: int,
        is_read: bool,
        num_lost: int = 0,
    ) -> bool:
        """Whether a request that could start now waits for the ``num_missing`` tokens that its load
        lacks, behind ``num_before`` that are there; of these ``num_lost`` would be lost without.

        ``is_read``: its reads are under way, as opposed to queued behind ``num_ahead`` tokens of
        others. A load that is late is expected to take as long again as it is late already, so a
        request stops waiting for a hung disk after what computing costs. Of ranks that share pages,
        the one that keeps them decides: the speed of the others says nothing about its tiers.
        """
        if self._always or self.follows:
            return True
        now = self._clock()
        load = self._loads.get(request)
        missing = remote_first(num_missing, (0,) if load is None else load.plan.parts)
        ahead = remote_first(num_ahead, self._loading_but(load))
        left_s = self.costs.load_seconds(missing, ahead)
        if load is not None and is_read:
            if load.begun_at is None:
                load.begun_at, load.left_to_begin_s = now, left_s
            left_s = max(left_s, now - load.begun_at - load.left_to_begin_s)
        num_saved = num_missing + num_lost
        wait = self.costs.should_wait(
            num_saved=num_saved, num_before=num_before - num_lost, left_s=left_s
        )
        if not wait:
            self.tokens[LoadDecision.GAVE_UP] += num_saved
        return wait

    def clear(self) -> None:
        """Forget all requests."""
        self._loads.clear()
        self._loading = [0] * len(TIERS)
        self._waiting.clear()
        self._waiting_tokens.clear()
        self._yielding.clear()
        self._waiting_s = 0.0
        self.num_waiting_tokens = 0
