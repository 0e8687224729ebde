"""A probe believes no quick single page, and ends as soon as a disk turns out slow."""

from __future__ import annotations

from sglang_tiered.integration.storage.transfers import MAX_PROBE_READS, MAX_PROBE_S, read_in_steps


class Disk:
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
    disk = Disk(0.002, 1.2)
    disk.probe(16)
    assert disk.reads == [1, 16]
    assert disk.lessons == [16]


def test_one_slow_page_spares_the_larger_reads() -> None:
    disk = Disk(2 * MAX_PROBE_S)
    disk.probe(16)
    assert disk.reads == disk.lessons == [1]


def test_a_fast_disk_is_read_repeatedly() -> None:
    disk = Disk(*[0.001] * (1 + MAX_PROBE_READS))
    disk.probe(16)
    assert disk.lessons == [16] * MAX_PROBE_READS


def test_a_tier_with_one_page_is_measured() -> None:
    disk = Disk(*[0.001] * (1 + MAX_PROBE_READS))
    disk.probe(1)
    assert disk.lessons == [1] * MAX_PROBE_READS
