"""``LoadMeter``: what the reads of one request's load took, tier by tier.

A run of a load may carry one (``Run.meter``). Those who read note in it; whoever made it looks once
the load has ended.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.storage.base import Meter, Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.storage.base import Job, Reason

__all__ = ["LoadMeter", "TierReading"]


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
    """Notes the reads of a load. ``begins`` and ``verified`` run on any thread, at times under an
    engine's lock, and append to lists, which needs no lock of its own."""

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
