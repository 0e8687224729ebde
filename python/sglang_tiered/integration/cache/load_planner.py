"""``LoadPlanner``: feeds the cost model of one scheduler, and follows its plans to their end.

The scheduler asks how much of a prefix to load when a request arrives, and whether a request that
was put off still gains by its turn. While a load runs, it asks whether to wait on. All three come
from the same learnt costs: of computing, and of loads from each tier. Loads finish on storage
threads and are only noted there; everything else runs on the scheduler thread.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sglang_tiered.integration.cache.loads import Loads, PricedLoad, RequestLoad, State
from sglang_tiered.integration.storage.tier_timing import InFlightRead, TierTiming
from sglang_tiered.policy.both_ends import plan_segments
from sglang_tiered.policy.cost_model import (
    TYPICAL_TRANSFER_BYTES,
    LoadDecision,
    LoadPlan,
    remote_first,
)
from sglang_tiered.policy.queue_wait import QueueWait
from sglang_tiered.storage.base import REMOTE_TIERS, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.policy.cost_model import CostModel
    from sglang_tiered.storage.base import Span


Request = TypeVar("Request")

STALE_AFTER_S = {Tier.NVME: 3.0, Tier.PEER: 10.0, Tier.OBJECT: 60.0}
"""A tier that no load has measured for this long is probed before it is declined for ever: disks
recover. A probe of another server takes some of its time; one of a bucket costs money."""

MIN_FAR_DEADLINE_S = 0.05
ALWAYS_DEADLINE_S = 10.0  # of reads that are waited for, whatever they cost, and of their turn

MAX_PIECE_S = 0.25
"""What a load for which no request waits may take: loads end one after the other, so one that comes
meanwhile waits for it. Or twice what the shortest takes, where a tier answers late."""

TIERS = tuple(Tier)
"""The index of a tier is its number in the cost model."""

PREFILL_UNITS = ("batch", "token", "pair", "copied_token")
LOAD_UNITS = ("load", "byte")
"""What the prices of prefill and of loads are of."""


class LoadPlanner(Generic[Request]):
    """Plans the loads of one scheduler. Scheduler thread, but for ``begin_read`` and
    ``end_read``."""

    def __init__(
        self,
        costs: CostModel,
        clock: Callable[[], float] = time.monotonic,
        *,
        always: bool = False,
        follows: bool = False,
    ) -> None:
        self.costs = costs
        self.always = always  # load everything, whatever it costs
        self.follows = follows  # plan to load everything: another rank knows what there is
        self.tokens = dict.fromkeys(LoadDecision, 0)
        self.timings = {
            tier: TierTiming(
                cost, clock, stale_after_s=STALE_AFTER_S[tier], reads_parts=tier is Tier.NVME
            )
            for tier, cost in zip(TIERS, costs.transfers, strict=True)
        }
        self.far_deadline_s = ALWAYS_DEADLINE_S if always else MIN_FAR_DEADLINE_S
        self._clock = clock
        self.loads: Loads[Request] = Loads(clock)
        self._loading = [0] * len(TIERS)  # tokens of loads under way, by where they come from
        self._queue = QueueWait()
        self._num_running = self._num_running_now = 0  # in the step before, and since
        self.num_both_ends = 0  # requests that computed their front while their back was loaded
        self.num_waiting_tokens = 0  # that those which wait are to compute
        self._deadline_is_due = False

    # ---- What things take ----

    @property
    def is_unpriced(self) -> bool:
        """Whether loads are waited for whatever that costs, until SGLang's own deadline."""
        return self.always or self.follows

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
        if num_copied:
            self.loads.note_progress()

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

    def drop_reads(self) -> None:
        """Drop the reads under way of a storage that was detached."""
        for timing in self.timings.values():
            timing.drop_reads()

    def stats(self) -> dict[str, Any]:
        """Return what was decided and learnt, as the metric table reads it."""
        prefill = self.costs.prefill
        return {
            "load_decisions": {} if self.follows else dict(self.tokens),  # another rank decides
            "prefill_tokens_per_s": prefill.tokens_per_s if prefill.num_observed else None,
            "prefill_prices": dict(zip(PREFILL_UNITS, prefill.prices, strict=True))
            if prefill.num_observed
            else {},
            "load_prices": {
                (tier, unit): price
                for tier, timing in self.timings.items()
                if timing.cost.num_observed
                for unit, price in zip(LOAD_UNITS, timing.cost.prices, strict=True)
            },
            "queue_wait_s": self.queue_wait_s,
            "waiting_tokens": self.num_waiting_tokens,
            "num_both_ends": self.num_both_ends,
            "reads": {
                tier: {
                    "durations": timing.durations.take(),
                    "busy_s": timing.busy_s,
                    "load_bytes_per_s": timing.bytes_per_s,
                }
                for tier, timing in self.timings.items()
            },
        }

    def learn(self) -> None:
        """Take in what reads took; called once in every step too."""
        for timing in self.timings.values():
            timing.learn()

    def step(self) -> None:
        """Begin a step of the scheduler."""
        self.learn()
        self._num_running, self._num_running_now = self._num_running_now, 0
        if self._deadline_is_due:
            self._deadline_is_due = False
            self._set_deadline()

    # ---- From arrival to admission ----

    @property
    def queue_wait_s(self) -> float:
        """Return how long a request that arrives now is expected to wait for its admission."""
        return self._queue.seconds(is_busy=self.num_running > 0)

    @property
    def wait_behind_batch_s(self) -> float:
        """Return the same without the wait for the batch that runs."""
        return self._queue.seconds(is_busy=False)

    @property
    def service_s(self) -> float:
        """Return what a request adds to the wait of those behind it, on average."""
        return self._queue.service_s

    @property
    def num_waiting(self) -> int:
        """Return how many requests have arrived and not been admitted."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Return how many requests were in the last batch, if it ran in this step or the last."""
        return max(self._num_running, self._num_running_now)

    def note_run(self, num_running: int) -> None:
        """Note that a batch runs now, while so many requests have been admitted."""
        self._num_running_now = num_running

    def num_others(self, record: RequestLoad | None = None) -> int:
        """Return how many requests a prefill holds up, beside this one."""
        is_among_them = record is not None and record.place is not None
        return self.num_running + len(self._queue) - is_among_them

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
        spans: Sequence[Span] = (),
        ends: Sequence[int] | None = None,
        rank: int = 0,
    ) -> int:
        """Plan the load of a request that arrived (again), with ``num_new`` tokens behind
        ``num_before`` cached ones. The tiers hold the first ``num_held`` of them, in ``spans``
        (empty: NVMe holds all). A load may end after any page, or where ``ends`` says. Requests of
        a smaller ``rank`` are admitted first. Returns how many tokens to load."""
        self.learn()
        record = self.loads.of(request)
        is_new = record.place is None
        self._drop_load(record)
        record.prefix = {
            "num_held": num_held,
            "num_new": num_new,
            "num_before": num_before,
            "spans": self.tokens_of(spans),
            "ends": ends,
        }
        plan = LoadPlan((num_held,), 0.0, 0.0)
        if not self.is_unpriced:
            is_busy = self.num_running > 0
            plan = self.costs.plan(
                **record.prefix,
                ahead=remote_first(num_ahead, self._loading),
                queue_wait_s=self._queue.seconds(record.place, is_busy=is_busy, rank=rank),
                num_others=self.num_others(record),
            )
        record.least = plan
        if is_new:
            self.tokens[LoadDecision.ABSENT] += max(0, num_new - num_held)
            record.num_held = num_held
        self._go_by(record, plan, rank)
        return plan.num_tokens

    def agreed(
        self, request: Request, num_tokens: int, *, num_ahead: int, is_back: bool = False
    ) -> None:
        """Note that all ranks together load ``num_tokens`` of a request that has just arrived
        (again), whatever was planned here, behind ``num_ahead`` tokens of other loads. What it
        waits for, and what it is to compute, follow from that. ``is_back``: they are the last ones
        of its prefix, and read from the end."""
        record = self.loads.get(request)
        load, prefix = record.load, record.prefix
        planned = (0, False) if load is None else (load.plan.num_tokens, load.is_back)
        if prefix is None or (num_tokens, is_back) == planned:
            return
        plan = LoadPlan((num_tokens,), 0.0, 0.0)
        if not self.is_unpriced:
            plan = self.costs.plan_of(
                num_tokens,
                num_new=prefix["num_new"],
                num_before=prefix["num_before"],
                ahead=remote_first(num_ahead, self._loading),
                spans=prefix["spans"],
            )
        self._go_by(record, plan, is_back=is_back)

    def _go_by(
        self, record: RequestLoad, plan: LoadPlan, rank: int = 0, *, is_back: bool = False
    ) -> None:
        """Expect the load of a plan, and the prefill of what it leaves."""
        self._drop_load(record)
        prefix = record.prefix
        assert prefix is not None
        if plan.num_tokens:
            record.load = PricedLoad(plan, is_back=is_back)
        rest = prefix["num_new"] - plan.num_tokens
        own_s = self.costs.prefill.seconds(rest, prefix["num_before"] + plan.num_tokens)
        is_busy = self.num_running > 0
        record.place = self._queue.arrives(
            record.place, own_s, self._clock(), is_busy=is_busy, rank=rank
        )
        self.num_waiting_tokens += rest - record.num_rest
        record.num_rest = rest

    def plan_segments(self, request: Request, *, num_ahead: int) -> list[int] | None:
        """Return the bounds of the segments of a waiting request's prefix to load from its back,
        while its front is computed. None if one of the two alone is as good."""
        record = self.loads.get(request)
        if record.prefix is None or self.always:
            return None
        prefix = record.prefix
        plan = plan_segments(
            self.costs,
            num_held=prefix["num_held"],
            num_new=prefix["num_new"],
            num_before=prefix["num_before"],
            spans=prefix["spans"],
            least=record.least,
            ahead=remote_first(num_ahead, self._loading),
            queue_wait_s=self._queue.seconds(record.place, is_busy=self.num_running > 0),
            num_others=self.num_others(record),
        )
        if plan is None:
            return None
        bounds, load = plan
        record.load = PricedLoad(load, is_back=True)
        return bounds

    def back_ended(self, request: Request, num_given_up: int) -> None:
        """Note that a load from the back has ended, of which so many tokens were not waited for.
        Unknown ones are ignored."""
        self.tokens[LoadDecision.GAVE_UP] += num_given_up
        record = self.loads.get(request)
        self._drop_load(record)
        if record.place is None and record.arrived_at is None:  # nor did it come again
            self.loads.drop(request)

    def leaves(self, request: Request) -> None:
        """Note that a request was admitted. Unknown ones are ignored."""
        record = self.loads.get(request)
        if record.place is not None:
            self._queue.admitted(record.place, self._clock())
            record.place = None
        self.loads.admitted(record)
        load = record.load
        if load is not None and load.is_back and load.queued_at is not None:
            self._settle(record)
            self.loads.keep_back(request)  # see ``back_ended``
        else:
            assert record.back is None  # or nobody would end what loads
            self.drop(request)

    def drop(self, request: Request) -> None:
        """Drop a request that was admitted or aborted. Unknown ones are ignored."""
        record = self.loads.get(request)
        if record.place is not None:
            self._queue.leaves(record.place)
        self._drop_load(record)
        self._settle(record)
        self.loads.drop(request)

    def _settle(self, record: RequestLoad) -> None:
        self.tokens[LoadDecision.DECLINED] += max(0, record.num_held - record.num_loaded)
        self.num_waiting_tokens -= record.num_rest

    def load_ended(self, request: Request) -> None:
        """Note that a request's load is under way no more, and that it waits for its turn. Its plan
        stays: it says what another attempt would gain. Unknown ones are ignored."""
        record = self.loads.get(request)
        self._end(record.load)
        if record.state is State.LOADING:
            self.loads.move(request, State.WAITING)

    def _drop_load(self, record: RequestLoad) -> None:
        self._end(record.load)
        record.load = None

    def _end(self, load: PricedLoad | None) -> None:
        if load is not None and load.queued_at is not None:
            self._count(load, -1)
            load.queued_at = None

    def begins(self, request: Request) -> None:
        """Note that a request's load was queued."""
        record = self.loads.get(request)
        load = record.load
        if load is not None:
            self.tokens[LoadDecision.LOAD] += load.plan.num_tokens
            record.num_loaded += load.plan.num_tokens
            if record.place is not None:
                record.place.counts = False
            self._begin(load)

    def _begin(self, load: PricedLoad) -> None:
        if load.queued_at is None:
            self._count(load, 1)
        load.queued_at = self._clock()
        if not self.always:
            useful_s = load.plan.useful_s if load.plan.num_remote else 0.0
            self.far_deadline_s = max(self.far_deadline_s, useful_s + self._longest_wait_s)
            self._deadline_is_due = True

    def plan_ahead(
        self,
        num_held: int,
        *,
        num_before: int,
        spans: Sequence[Span] = (),
        ends: Sequence[int] | None = None,
        least: int = 1,
    ) -> int:
        """Plan a load for which no request waits, behind no other: of ``num_held`` tokens behind
        ``num_before`` in memory, which lie in ``spans``. A load may end after any page, or where
        ``ends`` says, and has ``least`` tokens. Returns how many tokens to load: they are sooner
        loaded than computed, and the first of those that are if all would take long."""
        if self.is_unpriced:
            return num_held
        self.learn()
        tiers = self.tokens_of(spans)
        num_planned = self.costs.plan(
            num_held=num_held, num_new=num_held + 1, num_before=num_before, spans=tiers, ends=ends
        ).num_tokens
        page_tokens = self.costs.page_tokens
        places = range(page_tokens, num_planned + 1, page_tokens) if ends is None else ends
        lengths = [place for place in places if least <= place <= num_planned]
        if not lengths:
            return num_planned

        def plan_of(length: int) -> LoadPlan:
            return self.costs.plan_of(
                length, num_new=length + 1, num_before=num_before, spans=tiers
            )

        bound_s = max(MAX_PIECE_S, 2 * plan_of(lengths[0]).load_s)
        num_short = bisect_right(lengths, bound_s, key=lambda length: plan_of(length).load_s)
        place = max(0, num_short - 1)
        while place < len(lengths):
            plan = plan_of(lengths[place])
            if plan.load_s < plan.saved_s:
                return lengths[place]
            place = 2 * place + 1  # what a load takes by itself is as nothing in a longer one
        return lengths[-1]

    def begins_ahead(
        self, request: Request, num_tokens: int, *, num_before: int, spans: Sequence[Span] = ()
    ) -> None:
        """Note that a load of so many tokens was queued for which no request waits, until
        ``drop``."""
        plan = self.costs.plan_of(
            num_tokens,
            num_new=num_tokens + 1,
            num_before=num_before,
            spans=self.tokens_of(spans),
        )
        load = self.loads.of(request).load = PricedLoad(plan)
        self._begin(load)

    def tokens_of(self, spans: Sequence[Span]) -> list[tuple[int, int]]:
        """Return the tokens of spans, by the number of their tier."""
        page_tokens = self.costs.page_tokens
        return [(TIERS.index(span.tier), span.num_pages * page_tokens) for span in spans]

    def _set_deadline(self) -> None:
        """Bound reads of remote tiers: any of them is useless once no request would wait for it any
        more, not even the last one in the queue."""
        loads = (record.load for record in self.loads if record.load is not None)
        begun = (load for load in loads if load.queued_at is not None)
        useful = [load.plan.useful_s for load in begun if load.plan.num_remote]
        longest_s = max(useful, default=0.0) + self._longest_wait_s
        self.far_deadline_s = max(MIN_FAR_DEADLINE_S, longest_s)

    @property
    def _longest_wait_s(self) -> float:
        return self._queue.longest_s(is_busy=self.num_running > 0)

    def _count(self, load: PricedLoad, sign: int) -> None:
        for tier, num_tokens in enumerate(load.plan.parts):
            self._loading[tier] += sign * num_tokens

    def _loading_but(self, load: PricedLoad | None) -> list[int]:
        """Return the tokens of other loads under way, by tier."""
        others = self._loading[:]
        if load is not None and load.queued_at is not None:
            for tier, num_tokens in enumerate(load.plan.parts):
                others[tier] -= num_tokens
        return others

    def gains_by_its_turn(self, request: Request, *, num_ahead: int) -> bool:
        """Whether a request whose load was put off should go on waiting for it, behind
        ``num_ahead`` tokens of other loads."""
        record = self.loads.get(request)
        load = record.load
        if load is None or self.follows:
            return load is not None
        stalled_s = self.loads.stalled_s(record)
        if self.always:
            return stalled_s < ALWAYS_DEADLINE_S
        ahead = remote_first(num_ahead, self._loading)
        wait_s = stalled_s + self.costs.load_seconds(load.plan.parts, ahead)
        return self.costs.gains(wait_s, load.plan.saved_s, self.num_others(record))

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
        """Whether a request waits for the ``num_missing`` tokens that its load lacks, behind
        ``num_before`` that are there; of these ``num_lost`` would be lost without. While none that
        had loaded makes progress it waits no longer in all than it was to gain.

        ``is_read``: its reads are under way, as opposed to queued behind ``num_ahead`` tokens of
        others. A load that is late is expected to take as long again as it is late already, so a
        request stops waiting for a hung disk after what computing costs. Of ranks that share pages,
        the one that keeps them decides: the speed of the others says nothing about its tiers.
        """
        if self.is_unpriced:
            return True
        now = self._clock()
        record = self.loads.get(request)
        load = record.load
        missing = remote_first(num_missing, (0,) if load is None else load.plan.parts)
        ahead = remote_first(num_ahead, self._loading_but(load))
        left_s = self.costs.load_seconds(missing, ahead)
        if load is not None and is_read:
            if load.begun_at is None:
                load.begun_at, load.left_to_begin_s = now, left_s
            left_s = max(left_s, now - load.begun_at - load.left_to_begin_s)
        num_saved, num_others = num_missing + num_lost, self.num_others(record)
        held_s = self.loads.stalled_s(record)
        is_late = load is not None and not self.costs.gains(held_s, load.plan.saved_s, num_others)
        wait = not is_late and self.costs.should_wait(
            num_saved=num_saved,
            num_before=num_before - num_lost,
            left_s=left_s,
            num_others=num_others,
        )
        if not wait:
            self.tokens[LoadDecision.GAVE_UP] += num_saved
        return wait

    def clear(self) -> None:
        """Drop all loads, and the places of requests in the queue: the tree was emptied."""
        for record in self.loads:
            self._settle(record)
        self.loads.clear()
        self._loading = [0] * len(TIERS)
        self._queue.clear()
