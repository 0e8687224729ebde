"""Reads that overlap are priced by what the tier moves, and none is late behind another."""

from __future__ import annotations

import random

import pytest

from kit.clock import Clock
from sglang_tiered.integration.storage.probing import read_in_steps
from sglang_tiered.integration.storage.tier_timing import TierTiming
from sglang_tiered.policy.cost_model import TransferCost

MB = 1 << 20
BYTE_S = 1e-9  # 1 GB/s


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def timing(clock: Clock) -> TierTiming:
    return TierTiming(TransferCost((1e-4, BYTE_S)), clock, stale_after_s=3.0)


def share(
    timing: TierTiming, clock: Clock, sizes: list[int], depth: int, bytes_per_s: float
) -> None:
    """Reads of these sizes, so many at a time, of a disk that serves all of them at once."""
    waiting = list(reversed(sizes))
    left: dict[object, float] = {}
    while waiting or left:
        while waiting and len(left) < depth:
            size = waiting.pop()
            left[timing.begin(size)] = size
        read, size = min(left.items(), key=lambda item: item[1])
        clock.now += size * len(left) / bytes_per_s
        for each in left:
            left[each] -= size
        del left[read]
        timing.end(read, is_complete=True)  # type: ignore[arg-type]
        timing.learn()


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_overlapping_reads_are_priced_by_what_moves(
    clock: Clock, timing: TierTiming, depth: int, seed: int
) -> None:
    """A slow volume must not look faster because its reads end in pairs."""
    source = random.Random(seed)
    sizes = [source.choice([1, 2, 3]) * MB for _ in range(400)]
    share(timing, clock, sizes, depth, 150e6)
    found = [timing.cost.bytes_per_s or 0.0]
    for _ in range(20):
        share(timing, clock, [source.choice([1, 2, 3]) * MB for _ in range(20)], depth, 150e6)
        found.append(timing.cost.bytes_per_s or 0.0)
    assert min(found) > 0.7 * 150e6 and max(found) < 2 * 150e6


@pytest.mark.parametrize("slowdown", [10, 100])
def test_tier_that_slows_down_is_noticed_soon(
    clock: Clock, timing: TierTiming, slowdown: int
) -> None:
    """Under continuous load, in the time of a few of its reads."""
    share(timing, clock, [20 * MB] * 50, 2, 1e9)
    begun = clock.now
    share(timing, clock, [20 * MB] * 8, 2, 1e9 / slowdown)
    taken_s = clock.now - begun
    assert timing.cost.seconds(20 * MB) > 0.5 * slowdown * 20 * MB / 1e9
    assert taken_s < 9 * slowdown * 20 * MB / 1e9


def test_hanging_reads_are_believed_before_they_end(clock: Clock, timing: TierTiming) -> None:
    reads = [timing.begin(MB) for _ in range(3)]
    for _ in range(10):
        clock.now += 1.0
        timing.learn()
    assert timing.cost.seconds(MB) > 1.0
    for read in reads:
        timing.end(read, is_complete=False)
    timing.learn()
    assert timing.cost.seconds(MB) > 1.0 and timing.durations.take().count == 0


def test_a_burst_is_not_a_fast_disk(clock: Clock) -> None:
    """A probe reads a page, and then all; it learns from what takes long enough."""
    reads: list[int] = []
    lessons: list[int] = []

    def read(num_pages: int, min_informative_s: float) -> None:
        taken_s = 0.002 if not reads else 1.2
        clock.now += taken_s
        reads.append(num_pages)
        if taken_s >= min_informative_s:
            lessons.append(num_pages)

    read_in_steps(read, 16, clock)
    assert (reads, lessons) == ([1, 16], [16])
