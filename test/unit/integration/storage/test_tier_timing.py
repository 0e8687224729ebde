"""Reads that overlap are priced by what the tier moves, and none is late behind another."""

from __future__ import annotations

import random

import pytest

from kit.clock import Clock
from sglang_tiered.integration.storage.tier_timing import WINDOW_READS, TierTiming
from sglang_tiered.integration.storage.transfers import MAX_PROBE_READS, MAX_PROBE_S, read_in_steps
from sglang_tiered.policy.cost_model import TransferCost

MB = 1 << 20
BYTE_S = 1e-9  # 1 GB/s


def make(clock: Clock, *, load_s: float = 1e-4, byte_s: float = BYTE_S) -> TierTiming:
    return TierTiming(TransferCost((load_s, byte_s)), clock, stale_after_s=3.0)


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def timing(clock: Clock) -> TierTiming:
    return make(clock)


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


@pytest.mark.parametrize("num_reads", [9, 16, 24, 64])
def test_reads_that_begin_together_are_priced_right(
    clock: Clock, timing: TierTiming, num_reads: int
) -> None:
    for _ in range(5):
        share(timing, clock, [MB] * num_reads, num_reads, 250e6)
        clock.now += 1.0
    assert timing.cost.seconds(MB) == pytest.approx(MB / 250e6, rel=0.3)


@pytest.mark.parametrize("num_parts", [12, 40])
def test_load_in_equal_parts_is_not_underpriced(num_parts: int) -> None:
    """On a disk far slower than the first guess, where each part is as long as any other: a fixed
    time of every part would make whole loads look a multiple cheaper than they are."""
    clock, part, speed = Clock(100.0), MB // 2, 20e6
    timing = make(clock, load_s=1e-3)
    for _ in range(8):
        share(timing, clock, [part] * num_parts, 2, speed)
        clock.now += 1.0
        took_s = num_parts * part / speed
        assert timing.cost.seconds(num_parts * part) == pytest.approx(took_s, rel=0.2)


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


def test_hung_read_is_forgotten_with_its_storage(clock: Clock, timing: TierTiming) -> None:
    hung = timing.begin(MB)
    timing.drop_reads()
    for _ in range(20):
        clock.now += 5.0
        read = timing.begin(MB)
        clock.now += MB * BYTE_S
        timing.end(read, is_complete=True)
        timing.learn()
    assert timing.cost.seconds(MB) < 2 * MB * BYTE_S
    timing.end(hung, is_complete=False)  # its thread comes back


def test_small_read_behind_a_large_is_not_late(clock: Clock, timing: TierTiming) -> None:
    before = timing.cost.seconds(16 * MB)
    large, small = timing.begin(64 * MB), timing.begin(MB // 4)
    for _ in range(6):
        clock.now += 0.01
        timing.learn()
    assert timing.cost.seconds(16 * MB) == before
    clock.now += 64 * MB * BYTE_S - 0.06
    timing.end(large, is_complete=True)
    timing.learn()
    timing.end(small, is_complete=True)
    timing.learn()
    assert timing.cost.seconds(16 * MB) == pytest.approx(before, rel=0.1)


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


def test_quick_failure_hides_no_slow_read(clock: Clock, timing: TierTiming) -> None:
    """Misses end at once beside a read that takes long."""
    slow = timing.begin(MB)
    for _ in range(5 * WINDOW_READS):
        failed = timing.begin(MB)
        timing.end(failed, is_complete=False)
        clock.now += 0.1
    timing.end(slow, is_complete=True)
    timing.learn()
    assert timing.busy_s == pytest.approx(0.5 * WINDOW_READS)
    assert timing.cost.seconds(MB) > 0.3


def test_quick_failures_alone_teach_nothing(clock: Clock, timing: TierTiming) -> None:
    before = timing.cost.prices
    for _ in range(3 * WINDOW_READS):
        timing.end(timing.begin(16 * MB), is_complete=False)
        timing.learn()
    assert timing.cost.prices == before


def test_time_without_reads_is_not_theirs(clock: Clock, timing: TierTiming) -> None:
    for _ in range(20):
        read = timing.begin(MB)
        clock.now += MB * BYTE_S
        timing.end(read, is_complete=True)
        clock.now += 50.0
        timing.learn()
    assert timing.busy_s == pytest.approx(20 * MB * BYTE_S)
    assert timing.cost.seconds(16 * MB) == pytest.approx(16 * MB * BYTE_S, rel=0.2)


@pytest.mark.parametrize("reads_parts", [True, False])
def test_small_read_behind_others_is_not_late(reads_parts: bool) -> None:
    """A bucket takes 50 ms for any read, the last of several too, however small it is."""
    clock, load_s = Clock(100.0), 0.05
    timing = TierTiming(
        TransferCost((load_s, 5 * BYTE_S)), clock, stale_after_s=60.0, reads_parts=reads_parts
    )
    reads = [timing.begin(4 * MB) for _ in range(8)]
    for read in reads[:-1]:
        clock.now += 4 * MB * 5 * BYTE_S
        last = timing.begin(MB // 4) if read is reads[-2] else None
        timing.end(read, is_complete=True)
    timing.end(reads[-1], is_complete=True)
    timing.learn()
    before = timing.cost.seconds(4 * MB)
    for _ in range(10):
        clock.now += load_s / 10
        timing.learn()
    timing.end(last, is_complete=True)
    timing.learn()
    assert timing.cost.seconds(4 * MB) < 2 * before


def test_busy_remote_tier_keeps_its_fixed_time() -> None:
    """Small loads, of which one is always under way, must not make large ones look dear."""
    clock, load_s, byte_s = Clock(100.0), 0.05, 5e-9
    timing = TierTiming(
        TransferCost((load_s, byte_s)), clock, stale_after_s=60.0, reads_parts=False
    )
    ahead = timing.begin(MB)
    for _ in range(100):
        clock.now += (load_s + MB * byte_s) / 2
        following = timing.begin(MB)
        timing.end(ahead, is_complete=True)
        timing.learn()
        ahead = following
    real_s = load_s + 128 * MB * byte_s
    assert 0.4 * real_s < timing.cost.seconds(128 * MB) < 1.5 * real_s


class ProbedDisk:
    """Reads that take what they are told to; what was read and what was learnt from."""

    def __init__(self, *seconds: float) -> None:
        self.now = 0.0
        self.seconds = list(seconds)
        self.reads: list[int] = []
        self.lessons: list[int] = []

    def read(self, num_pages: int, min_informative_s: float) -> None:
        taken_s = self.seconds.pop(0)
        self.now += taken_s
        self.reads.append(num_pages)
        if taken_s >= min_informative_s:
            self.lessons.append(num_pages)

    def probe(self, num_pages: int) -> None:
        read_in_steps(self.read, num_pages, lambda: self.now)


def test_a_burst_is_not_a_fast_disk() -> None:
    disk = ProbedDisk(0.002, 1.2)
    disk.probe(16)
    assert disk.reads == [1, 16]
    assert disk.lessons == [16]


def test_one_slow_page_spares_the_larger_reads() -> None:
    disk = ProbedDisk(2 * MAX_PROBE_S)
    disk.probe(16)
    assert disk.reads == disk.lessons == [1]


@pytest.mark.parametrize("num_pages", [1, 16])
def test_a_fast_disk_is_read_repeatedly(num_pages: int) -> None:
    disk = ProbedDisk(*[0.001] * (1 + MAX_PROBE_READS))
    disk.probe(num_pages)
    assert disk.lessons == [num_pages] * MAX_PROBE_READS
