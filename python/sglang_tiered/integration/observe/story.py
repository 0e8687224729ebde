"""``Story``: what is known of one request, and ``record_of``, which makes a line of it. Pure: no
SGLang, no clock."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.request_log import (
    NO_TIME,
    VERSION,
    Copy,
    GivenUp,
    Load,
    Lookup,
    Plan,
    Prefill,
    RequestRecord,
    Sources,
    TierLoad,
    Wait,
)
from sglang_tiered.storage.base import Meter, Tier

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from sglang_tiered.request_log import Cause, Decision, Why
    from sglang_tiered.storage.base import Job, Reason

__all__ = ["End", "LoadMeter", "LookedUp", "PricedPlan", "Story", "record_of"]


_DIGITS = 6
"""Of a second: microseconds."""


class _MeteredRead(NamedTuple):
    tier: Tier
    begun_at: float
    ended_at: float
    num_pages: int  # that arrived
    num_bytes: int  # of those
    failed: tuple[Reason, ...]


@dataclass(slots=True)
class TierReading:
    """The reads of one tier. Times are of the meter's clock."""

    begun_at: float
    ended_at: float
    num_reads: int = 0
    num_pages: int = 0  # that arrived
    num_bytes: int = 0  # of those
    verify_s: float = 0.0  # of all threads together
    verified: tuple[float, float] | None = None  # when the first check began, and the last ended
    failed: Counter[Reason] = field(default_factory=Counter)  # pages


class LoadMeter(Meter):
    """Notes the reads of one request's load, tier by tier (``Run.meter``); whoever made it looks
    once the load has ended.

    ``begins`` and ``verified`` run on any thread, at times under an engine's lock, and append to
    lists, which needs no lock of its own.
    """

    __slots__ = ("_checks", "_clock", "_reads")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._reads: list[_MeteredRead] = []
        self._checks: list[tuple[float, float]] = []  # begin and end

    def begins(self, tier: Tier, num_bytes: int) -> Callable[[Job], None]:
        begun_at = self._clock()

        def ended(job: Job) -> None:
            failed = tuple(reason for reason, ok in zip(job.reasons, job.ok, strict=True) if not ok)
            num_asked = len(job.reasons)
            num_pages = num_asked - len(failed)
            arrived = num_bytes * num_pages // max(1, num_asked)  # pages of a load are of one size
            self._reads.append(
                _MeteredRead(tier, begun_at, self._clock(), num_pages, arrived, failed)
            )

        return ended

    def verified(self, seconds: float) -> None:
        now = self._clock()
        self._checks.append((now - seconds, now))

    def readings(self) -> dict[Tier, TierReading]:
        """Add up what has ended so far, by tier, in the order in which they were asked first."""
        found: dict[Tier, TierReading] = {}
        for read in sorted(self._reads[:], key=lambda read: read.begun_at):
            reading = found.setdefault(read.tier, TierReading(read.begun_at, read.ended_at))
            reading.ended_at = max(reading.ended_at, read.ended_at)
            reading.num_reads += 1
            reading.num_pages += read.num_pages
            reading.num_bytes += read.num_bytes
            reading.failed.update(read.failed)
        nvme, checks = found.get(Tier.NVME), self._checks[:]
        if nvme is not None and checks:
            nvme.verify_s = sum(ended - began for began, ended in checks)
            nvme.verified = min(began for began, _ in checks), max(ended for _, ended in checks)
        return found


def _s(seconds: float) -> float:
    return round(seconds, _DIGITS) or NO_TIME


class LookedUp(NamedTuple):
    """One lookup. Times here are of the stories' clock."""

    began_at: float
    ended_at: float
    num_before: int
    num_new: int
    parts: tuple[tuple[Tier, int], ...]  # pages
    page_tokens: int


class PricedPlan(NamedTuple):
    """One plan, all prices in seconds."""

    at: float
    decision: Decision
    parts: dict[Tier, int]  # tokens
    expected_s: dict[Tier, float]
    is_back: bool
    load_s: float
    held_load_s: float
    held_prefill_s: float
    prefill_all_s: float
    prefill_rest_s: float
    queue_wait_s: float
    num_tokens_ahead: int


class End(NamedTuple):
    """What SGLang knows of a request that ended."""

    at: float
    unix_minus_clock_s: float
    rid: str
    reason: str
    tenant: str
    arrived_at: float
    admitted_at: float | None
    first_token_at: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_retractions: int
    num_device: int
    num_host: int
    num_storage: int


@dataclass(slots=True, eq=False)
class Story:
    """Moments and figures of one request, as they are noted. Times are of the stories' clock."""

    arrived_at: float
    num_ahead: int = 0
    num_running: int = 0
    queue_wait_s: float = 0.0  # as it was expected then
    req: Any = None  # SGLang's, once it is known
    held: LookedUp | None = None
    num_lookups: int = 0
    plan: PricedPlan | None = None
    waits_for: Why | None = None  # beside its turn
    waiting_since: float | None = None  # in its turn
    waits: list[tuple[Why, float, float]] = field(default_factory=list)
    load_queued_at: float | None = None
    load_ended_at: float | None = None
    num_loaded: int = 0
    given_up: tuple[Cause, float, int] | None = None
    meter: LoadMeter | None = None
    parts: list[Any] = field(default_factory=list)  # handles of parts of its load
    admitted_at: float | None = None
    copied_at: float | None = None
    copy_ended_at: float | None = None  # at the latest
    num_copied: int = 0
    copy_bytes: int = 0
    prefill_ended_at: float | None = None  # its first batch
    prefill_s: float = 0.0
    others_s: float = 0.0  # prefill batches of others before its first token
    num_batches: int = 0
    num_prefilled: int = 0
    is_prefilled: bool = False
    told: set[tuple[str, float]] = field(default_factory=set)  # spans, by name and begin

    def stop_waiting(self, now: float) -> None:
        """End the wait that goes on, if one does."""
        if self.waiting_since is not None:
            self.waits.append((self.waits_for or "others", self.waiting_since, now))
            self.waiting_since = None

    @property
    def has_back(self) -> bool:
        """Whether its front is computed while its back loads."""
        return self.plan is not None and self.plan.is_back

    @property
    def may_load(self) -> bool:
        """Whether a load is that of its line: one of a request that was retracted is not."""
        return self.admitted_at is None or self.has_back

    def readings(self) -> dict[Tier, TierReading]:
        """Return what was read for it, by tier."""
        return {} if self.meter is None else self.meter.readings()


def record_of(story: Story, end: End, *, replica: int = 0) -> RequestRecord:
    """Make the line of a request that ended."""
    arrived_at, readings = end.arrived_at, story.readings()

    def since(at: float) -> float:
        return _s(max(0.0, at - arrived_at))

    def later(at: float | None) -> float | None:
        return None if at is None else since(at)

    return RequestRecord(
        v=VERSION,
        rid=end.rid,
        arrived_unix_s=_s(arrived_at + end.unix_minus_clock_s),
        replica=replica,
        tenant=end.tenant,
        end=end.reason,
        num_prompt_tokens=end.num_prompt_tokens,
        num_output_tokens=end.num_output_tokens,
        num_retractions=end.num_retractions,
        num_ahead=story.num_ahead,
        num_running=story.num_running,
        admitted_s=later(end.admitted_at),
        first_token_s=later(end.first_token_at),
        total_s=since(end.at),
        tokens=_sources(end, readings),
        lookup=_lookup(story, since),
        plan=_plan(story, since),
        waits=tuple(
            Wait(why=why, at_s=since(began), wait_s=_s(ended - began))
            for why, began, ended in story.waits
        ),
        load=_load(story, end, readings, since),
        given_up=None
        if story.given_up is None
        else GivenUp(
            why=story.given_up[0], at_s=since(story.given_up[1]), num_tokens=story.given_up[2]
        ),
        copy=None
        if story.copied_at is None
        else Copy(
            at_s=since(story.copied_at),
            copy_s=None
            if story.copy_ended_at is None
            else _s(story.copy_ended_at - story.copied_at),
            num_tokens=story.num_copied,
            num_bytes=story.copy_bytes,
        ),
        prefill=None
        if story.prefill_ended_at is None
        else Prefill(
            at_s=since(story.prefill_ended_at),
            prefill_s=_s(story.prefill_s),
            others_s=_s(story.others_s),
            num_batches=story.num_batches,
            num_tokens=story.num_prefilled,
        ),
    )


def _sources(end: End, readings: dict[Tier, TierReading]) -> Sources:
    """SGLang counts all tiers as one, so their tokens are shared out by the pages that arrived."""
    by_tier = dict.fromkeys(Tier, 0)
    num_pages = sum(reading.num_pages for reading in readings.values())
    for tier, reading in readings.items():
        by_tier[tier] = end.num_storage * reading.num_pages // max(1, num_pages)
    # What is left over is less than a page a tier, or all, if nothing was metered.
    nearest = next(iter(readings), Tier.NVME)
    by_tier[nearest] += end.num_storage - sum(by_tier.values())
    cached = end.num_device + end.num_host + end.num_storage
    return Sources(
        num_device=end.num_device,
        num_host=end.num_host,
        num_nvme=by_tier[Tier.NVME],
        num_object=by_tier[Tier.OBJECT],
        num_peer=by_tier[Tier.PEER],
        num_computed=max(0, end.num_prompt_tokens - cached) if end.admitted_at else 0,
    )


def _lookup(story: Story, since: Any) -> Lookup | None:
    held = story.held
    if held is None:
        return None
    pages = dict.fromkeys(Tier, 0)
    for tier, num_pages in held.parts:
        pages[tier] += num_pages
    return Lookup(
        at_s=since(held.began_at),
        lookup_s=_s(held.ended_at - held.began_at),
        num_lookups=story.num_lookups,
        page_tokens=held.page_tokens,
        num_memory_tokens=held.num_before,
        num_nvme_pages=pages[Tier.NVME],
        num_object_pages=pages[Tier.OBJECT],
        num_peer_pages=pages[Tier.PEER],
    )


def _plan(story: Story, since: Any) -> Plan | None:
    plan = story.plan
    if plan is None:
        return None
    return Plan(
        at_s=since(plan.at),
        decision=plan.decision,
        num_nvme_tokens=plan.parts.get(Tier.NVME, 0),
        num_object_tokens=plan.parts.get(Tier.OBJECT, 0),
        num_peer_tokens=plan.parts.get(Tier.PEER, 0),
        is_both_ends=plan.is_back,
        load_s=_s(plan.load_s),
        held_load_s=_s(plan.held_load_s),
        held_prefill_s=_s(plan.held_prefill_s),
        prefill_all_s=_s(plan.prefill_all_s),
        prefill_rest_s=_s(plan.prefill_rest_s),
        queue_wait_s=_s(plan.queue_wait_s),
        num_tokens_ahead=plan.num_tokens_ahead,
    )


def _load(story: Story, end: End, readings: dict[Tier, TierReading], since: Any) -> Load | None:
    queued_at, plan = story.load_queued_at, story.plan
    if queued_at is None:
        return None
    ended_at = story.load_ended_at
    if ended_at is None and story.given_up is not None:
        ended_at = story.given_up[1]
    return Load(
        at_s=since(queued_at),
        load_s=None if ended_at is None else _s(max(0.0, ended_at - queued_at)),
        num_tokens=0 if plan is None else sum(plan.parts.values()),
        num_loaded_tokens=story.num_loaded,
        tiers=tuple(
            TierLoad(
                tier=tier.value,
                at_s=since(reading.begun_at),
                read_s=_s(reading.ended_at - reading.begun_at),
                num_reads=reading.num_reads,
                num_bytes=reading.num_bytes,
                expected_s=_s(0.0 if plan is None else plan.expected_s.get(tier, 0.0)),
                verify_s=_s(reading.verify_s),
                failed={reason.value: count for reason, count in reading.failed.items()},
            )
            for tier, reading in readings.items()
        ),
    )
