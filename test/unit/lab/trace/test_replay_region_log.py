"""The modelled log holds and writes what the real store does, given the same pages."""

from __future__ import annotations

import hashlib
import mmap
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.waiting import drained
from sglang_tiered.storage.base import Run
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    MAX_EXTENT_PAGES,
    extent_header_bytes,
    fits_region,
    padded,
)
from sglang_tiered.storage.region.writer import MAX_EXTENT_BYTES
from sglang_tiered_lab.trace.replay.region_log import RegionLog

TIMEOUT_S = 20.0


def conversations(seed: int, count: int, *, longest: int) -> Iterator[list[int]]:
    """Prompts of which two in three go on where a recent one ended."""
    choose = random.Random(seed)
    known: list[list[int]] = []
    unit = 0
    for _ in range(count):
        if known and choose.random() < 0.65:
            chain = choose.choice(known[-20:])
        else:
            chain = []
            known.append(chain)
        for _ in range(choose.randint(1, longest)):
            chain.append(unit)
            unit += 1
        yield chain[:100]


@pytest.mark.parametrize(
    ("page_bytes", "region_bytes", "num_regions", "num_requests"),
    [(4096, 64 * 4096, 6, 250), (3000, 64 * 4096, 10, 250), (1 << 20, 16 << 20, 5, 60)],
)
def test_modelled_log_serves_what_the_real_store_serves(
    tmp_path: Path, page_bytes: int, region_bytes: int, num_regions: int, num_requests: int
) -> None:
    capacity_bytes = num_regions * region_bytes
    memory = memoryview(mmap.mmap(-1, page_bytes * 100))
    pages = tuple((memory[i * page_bytes : (i + 1) * page_bytes],) for i in range(100))
    log = RegionLog(capacity_bytes, region_bytes)
    engine = RegionEngine(
        tmp_path / "store",
        namespace=b"1" * 32,
        capacity_bytes=capacity_bytes,
        region_bytes=region_bytes,
    )
    hits = [0, 0]
    for units in conversations(1, num_requests, longest=16):
        keys = tuple(hashlib.sha256(b"%d" % unit).digest() for unit in units)
        real, modelled = engine.lookup(keys).num_hits, log.num_leading(units)
        hits[0] += real
        hits[1] += modelled
        if real:
            job = engine.submit_load(Run(keys[:real], pages[:real]))
            assert job.wait(TIMEOUT_S)
            assert job.num_leading_ok == real
        log.loaded(units[:modelled])
        if real < len(units):
            job = engine.submit_store(Run(keys[real:], pages[real : len(keys)]))
            assert job.wait(TIMEOUT_S)
            assert all(job.ok)
            assert drained(engine, TIMEOUT_S)
        log.store(units[modelled:], [page_bytes] * (len(units) - modelled))
    assert engine.flush(TIMEOUT_S)
    stats = engine.stats()
    engine.close()
    log.check_integrity()
    assert stats.num_pages_reinserted > 0
    assert log.num_evicted > 0
    # Of pages loaded equally often, the store saves those whose rows are highest, and rows are
    # used again in an order that the model does not keep.
    assert hits[1] == pytest.approx(hits[0], rel=0.05)
    assert log.bytes_written == pytest.approx(stats.bytes_written, rel=0.01)
    assert log.num_reinserted == pytest.approx(stats.num_pages_reinserted, rel=0.05)


def by_the_page(runs: list[int], page_bytes: int, region_bytes: int) -> list[tuple[int, int, int]]:
    """Extents, pages and tail of each region, a page at a time as the store's writer takes them."""
    size = padded(page_bytes)
    regions = [(0, 0, BLOCK_BYTES)]
    for run in runs:
        left = run
        while left:
            extents, pages, tail = regions[-1]
            count = 0
            while count < min(left, MAX_EXTENT_PAGES):
                payload = (count + 1) * size
                end = tail + extent_header_bytes(count + 1) + payload
                too_large = count and payload > MAX_EXTENT_BYTES
                if too_large or not fits_region(region_bytes, end, extents + 1, pages + count + 1):
                    break
                count += 1
            if count:
                end = tail + extent_header_bytes(count) + count * size
                regions[-1] = (extents + 1, pages + count, end)
            else:
                regions.append((0, 0, BLOCK_BYTES))
            left -= count
    return regions


@pytest.mark.parametrize(
    ("page_bytes", "region_bytes"),
    [
        (100, 1 << 20),
        (9000, 1 << 20),
        (1 << 20, 64 << 20),
        (8 << 20, 256 << 20),
        (3 << 20, 1 << 25),
    ],
)
def test_a_run_lies_as_its_single_pages_would(page_bytes: int, region_bytes: int) -> None:
    choose = random.Random(page_bytes)
    runs = [choose.randint(1, 1400) for _ in range(12)]
    log = RegionLog(4000 * region_bytes, region_bytes)
    unit = 0
    for count in runs:
        log.store(list(range(unit, unit + count)), [page_bytes] * count)
        unit += count
    assert log.num_evicted == 0
    assert by_the_page(runs, page_bytes, region_bytes) == [
        (region.num_extents, len(region.units), region.tail) for region in log._regions
    ]
    log.check_integrity()


@pytest.mark.parametrize(
    "lengths", [[9000] * 9 + [100], [100, 9000, 9000], [9000, 100, 100, 100], [5000, 100, 5000]]
)
def test_each_page_takes_its_own_bytes(lengths: list[int]) -> None:
    """Written bytes are those of the extents: a header and whole blocks for every page."""
    log = RegionLog(1 << 22, 1 << 20)
    log.store(list(range(len(lengths))), lengths)
    (region,) = log._regions
    payload = sum(map(padded, lengths))
    headers = region.tail - BLOCK_BYTES - payload
    assert log.bytes_written == region.tail
    assert headers == region.num_extents * extent_header_bytes(1)
    assert sum(region.lengths) == sum(lengths) == log.bytes_stored
    assert log.num_leading(list(range(len(lengths)))) == len(lengths)
    log.check_integrity()


def test_of_hot_pages_the_most_loaded_is_saved() -> None:
    """The credit of the first victim, a tenth of its region, reaches for one page of two."""
    region_bytes = 16 * 4096 + 65536
    log = RegionLog(2 * region_bytes, region_bytes)
    log.store([0, 1], [9000, 9000])
    for unit in (0, 0, 0, 1):
        log.loaded([unit])
    log.store(list(range(10, 60)), [4096] * 50)
    assert log.num_reinserted == 1
    assert 0 in log
    assert 1 not in log


def test_the_cap_holds_and_loaded_pages_outlive_others() -> None:
    log = RegionLog(1 << 20, 1 << 18)
    log.store([0, 1, 2], [4096] * 3)
    for start in range(10, 3000, 30):
        log.loaded([0, 1, 2])
        log.store(list(range(start, start + 30)), [4096] * 30)
        assert len(log) * 4096 <= 1 << 20
    assert log.num_leading([0, 1, 2]) == 3
    assert 10 not in log
    log.check_integrity()


def test_a_page_larger_than_a_region_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit a region"):
        RegionLog(1 << 20, 1 << 18).store([1], [1 << 18])
    with pytest.raises(ValueError, match="do not hold two regions"):
        RegionLog(1 << 18, 1 << 18)
