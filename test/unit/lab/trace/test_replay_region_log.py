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
