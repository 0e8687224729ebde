"""Pages of 16 and 32 MiB, as large models have them, in real files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kit.waiting import drained
from sglang_tiered.storage.base import Job, Reason, Run
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import aligned_buffer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MiB = 1 << 20
TIMEOUT_S = 120.0
NUM_PAGES = 6

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=[16, 32])
def page_bytes(request: pytest.FixtureRequest) -> int:
    return int(request.param) * MiB


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RegionEngine]:
    """Its queue is shorter than what comes at once, as the one of a server would be by default."""
    made = RegionEngine(
        tmp_path,
        namespace=b"\x11" * 32,
        capacity_bytes=384 * MiB,
        region_bytes=128 * MiB,
        max_queued_store_bytes=64 * MiB,
    )
    yield made
    assert drained(made, TIMEOUT_S)
    made.check_integrity()
    made.close()


def make_pool(page_bytes: int, seed: int, *, offset: int = 0) -> Run:
    """Pages side by side in one pool, as SGLang's host pool has them; ``offset`` bytes behind where
    direct I/O could take them as they are."""
    pool = aligned_buffer(NUM_PAGES * page_bytes + 4096)[offset:]
    np.frombuffer(pool, np.uint8)[:] = np.random.default_rng(seed).integers(
        0, 256, pool.nbytes, np.uint8
    )
    keys = tuple(bytes([seed, number]) * 16 for number in range(NUM_PAGES))
    pages = tuple((pool[i * page_bytes : (i + 1) * page_bytes],) for i in range(NUM_PAGES))
    return Run(keys, pages)


def blank(run: Run) -> Run:
    return Run(run.keys, tuple((aligned_buffer(page[0].nbytes),) for page in run.pages))


def done(job: Job) -> list[Reason]:
    assert job.wait(TIMEOUT_S), "the job did not finish"
    return job.reasons


@pytest.mark.parametrize("offset", [0, 8], ids=["aligned", "unaligned"])
def test_a_call_beyond_the_queue_is_stored_whole(
    engine: RegionEngine, page_bytes: int, offset: int
) -> None:
    run = make_pool(page_bytes, 1, offset=offset)
    assert done(engine.submit_store(run)) == [Reason.OK] * NUM_PAGES
    assert engine.lookup(run.keys).num_hits == NUM_PAGES
    target = blank(run)
    assert done(engine.submit_load(target)) == [Reason.OK] * NUM_PAGES
    for (stored,), (loaded,) in zip(run.pages, target.pages, strict=True):
        assert np.array_equal(np.frombuffer(stored, np.uint8), np.frombuffer(loaded, np.uint8))


def test_the_log_comes_round_and_keeps_the_latest(engine: RegionEngine, page_bytes: int) -> None:
    """Eviction, and saving what was loaded, with regions of a few pages each."""
    first = make_pool(page_bytes, 1)
    assert done(engine.submit_store(first)) == [Reason.OK] * NUM_PAGES
    done(engine.submit_load(blank(first)))
    for seed in (2, 3, 4):
        run = make_pool(page_bytes, seed)
        assert done(engine.submit_store(run)) == [Reason.OK] * NUM_PAGES
        target = blank(run)
        assert done(engine.submit_load(target)) == [Reason.OK] * NUM_PAGES
        assert target.pages[-1][0] == run.pages[-1][0]
    stats = engine.stats()
    assert stats.num_pages_evicted > 0
    assert stats.physical_bytes <= stats.capacity_bytes


def test_a_restart_finds_them(engine: RegionEngine, tmp_path: Path, page_bytes: int) -> None:
    run = make_pool(page_bytes, 1)
    assert done(engine.submit_store(run)) == [Reason.OK] * NUM_PAGES
    engine.close()
    again = RegionEngine(
        tmp_path, namespace=b"\x11" * 32, capacity_bytes=384 * MiB, region_bytes=128 * MiB
    )
    try:
        target = blank(run)
        assert done(again.submit_load(target)) == [Reason.OK] * NUM_PAGES
        assert target.pages[0][0] == run.pages[0][0]
    finally:
        again.close()
