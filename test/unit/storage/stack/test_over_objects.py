"""Two stacks over one directory of objects: what one stored the other serves and keeps."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from kit.runs import NAMESPACE, Blank, MakeRun, PageData
from kit.waiting import TIMEOUT_S, drained, finished
from sglang_tiered.storage.base import Erasure, Reason, Run, Tier
from sglang_tiered.storage.bucket import BucketEngine, BucketSettings
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.stack import TierStack
from sglang_tiered.storage.stack.tiers import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


TENANT = b"a" * 16
PAGES = [8192] * 4


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Callable[[str], TierStack]]:
    made: list[TierStack] = []

    def open_engine(name: str) -> TierStack:
        nvme = RegionEngine(
            tmp_path / name,
            namespace=NAMESPACE,
            capacity_bytes=1 << 22,
            region_bytes=1 << 18,
            num_threads=2,
        )
        settings = BucketSettings(
            url=(tmp_path / "shared").as_uri(),
            staging_bytes=1 << 22,
            num_connections=2,
        )
        engine = TierStack(nvme, [BucketEngine(settings, namespace=NAMESPACE)])
        made.append(engine)
        return engine

    yield open_engine
    for engine in made:
        assert drained(engine, TIMEOUT_S)
        engine.close()


def test_what_one_server_flushed_another_serves_and_keeps(
    open_engine: Callable[[str], TierStack],
    make_run: MakeRun,
    blank: Blank,
    page_data: PageData,
) -> None:
    first, second = open_engine("first"), open_engine("second")
    run = make_run(1, PAGES)
    finished(first.submit_store(Run(run.keys, run.pages, TENANT)))
    assert first.flush_to_bucket(run.keys, TIMEOUT_S) == [True] * 4
    first.close()
    assert second.bucket.refresh(TIMEOUT_S)
    assert second.lookup_spans(run.keys) == [Span(Tier.OBJECT, 4)]
    target = blank(run)
    assert finished(second.submit_load(target, tenant=TENANT)) == [Reason.OK] * 4
    assert page_data(target) == page_data(run)
    deadline = time.monotonic() + TIMEOUT_S
    while second.stack_stats().num_promoted < 4:
        assert time.monotonic() < deadline, "nothing was promoted"
        time.sleep(0.002)
    assert second.lookup_spans(run.keys) == [Span(Tier.NVME, 4)]
    assert [usage.tenant for usage in second.nvme.tenants(9)] == [TENANT]


def test_what_was_collected_is_not_durable(
    open_engine: Callable[[str], TierStack], make_run: MakeRun
) -> None:
    """By a server of a smaller cap, or by hand: nobody lists what is gone for ten minutes."""
    first = open_engine("first")
    run = make_run(1, PAGES)
    finished(first.submit_store(Run(run.keys, run.pages, TENANT)))
    assert first.flush_to_bucket(run.keys, TIMEOUT_S) == [True] * 4
    requests, layout = first.bucket._requests, first.bucket._state.layout

    def collected() -> list[str]:
        paths = [each.path for chunk in requests.listing(layout.pages) for each in chunk]
        requests.delete(paths)
        return paths

    assert len(collected()) == 4
    assert first.flush_to_bucket(run.keys, TIMEOUT_S) == [True] * 4
    assert len(collected()) == 4, "what NVMe holds goes up again"
    assert is_true(first.nvme.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
    assert first.flush_to_bucket(run.keys, TIMEOUT_S) == [False] * 4


def test_a_purge_of_both_tiers_outlives_the_server(
    open_engine: Callable[[str], TierStack], make_run: MakeRun
) -> None:
    first = open_engine("first")
    mine, other = make_run(1, PAGES), make_run(2, PAGES)
    finished(first.submit_store(Run(mine.keys, mine.pages, TENANT)))
    finished(first.submit_store(other))
    assert all(first.flush_to_bucket([*mine.keys, *other.keys], TIMEOUT_S))
    assert is_true(first.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
    assert first.lookup(mine.keys).num_hits == 0
    first.close()
    second = open_engine("second")
    assert second.bucket.refresh(TIMEOUT_S)
    assert second.lookup(mine.keys).num_hits == 0
    assert second.lookup(other.keys).num_hits == 4


def test_what_another_server_forgot_leaves_this_ones_disk(
    open_engine: Callable[[str], TierStack], make_run: MakeRun, blank: Blank
) -> None:
    first, second = open_engine("first"), open_engine("second")
    run = make_run(1, PAGES)
    for engine in (first, second):
        finished(engine.submit_store(Run(run.keys, run.pages, TENANT)))
        assert engine.flush_to_bucket(run.keys, TIMEOUT_S) == [True] * 4
    assert is_true(first.erase(Erasure.of(run.keys[1:3])), TIMEOUT_S)
    assert second.bucket.refresh(TIMEOUT_S)
    expected = [True, False, False, True]
    for engine in (first, second):
        assert engine.contains(run.keys) == expected
        assert engine.nvme.contains(run.keys) == expected
    again = Run(run.keys[1:2], run.pages[1:2], TENANT)
    finished(second.submit_store(again))
    assert second.flush_to_bucket(again.keys, TIMEOUT_S) == [True]
    assert first.bucket.refresh(TIMEOUT_S)
    assert first.contains(run.keys) == [True, True, False, True]


def test_a_restart_keeps_what_was_stored_again(
    open_engine: Callable[[str], TierStack], make_run: MakeRun
) -> None:
    """Every start reads all tombstones that are left."""
    run = make_run(1, PAGES)
    other = make_run(2, PAGES)
    first, second = open_engine("first"), open_engine("second")
    for stored in (run, other):
        finished(first.submit_store(Run(stored.keys, stored.pages, TENANT)))
    assert is_true(first.erase(Erasure.of(run.keys)), TIMEOUT_S)
    assert is_true(second.erase(Erasure.of(other.keys)), TIMEOUT_S)
    assert first.bucket.refresh(TIMEOUT_S)
    assert not any(first.nvme.contains(run.keys + other.keys))
    for stored in (run, other):
        finished(first.submit_store(Run(stored.keys, stored.pages, TENANT)))
    assert first.flush(TIMEOUT_S)
    first.close()
    first = open_engine("first")
    assert first.bucket.refresh(TIMEOUT_S, full=True)
    assert all(first.nvme.contains(run.keys + other.keys))


def test_a_server_that_was_down_forgets_then(
    open_engine: Callable[[str], TierStack], make_run: MakeRun
) -> None:
    run = make_run(1, PAGES)
    first, second = open_engine("first"), open_engine("second")
    finished(first.submit_store(Run(run.keys, run.pages, TENANT)))
    assert first.flush(TIMEOUT_S)
    first.close()
    assert is_true(second.erase(Erasure.of(run.keys[:3])), TIMEOUT_S)
    first = open_engine("first")
    assert first.bucket.refresh(TIMEOUT_S, full=True)
    assert first.contains(run.keys) == [False, False, False, True]


def test_a_copy_read_before_the_tombstone_stays_up(
    open_engine: Callable[[str], TierStack], make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_engine("first"), open_engine("second")
    run = make_run(1, PAGES)
    assert second.bucket.refresh(TIMEOUT_S)
    read, told = threading.Event(), threading.Event()
    demoter = second._demoter
    read_batch = demoter._read

    def slow_read(batch: object) -> object:
        found = read_batch(batch)
        read.set()
        assert told.wait(TIMEOUT_S)
        return found

    monkeypatch.setattr(demoter, "_read", slow_read)
    finished(second.submit_store(Run(run.keys, run.pages, TENANT)))
    assert read.wait(TIMEOUT_S), "nothing was copied"
    assert is_true(first.erase(Erasure.of(run.keys[:2])), TIMEOUT_S)
    assert second.bucket.refresh(TIMEOUT_S)
    told.set()
    assert second.flush_to_bucket(run.keys, TIMEOUT_S)[2:] == [True, True]
    assert first.bucket.refresh(TIMEOUT_S)
    for engine in (first, second):
        assert engine.contains(run.keys) == [False, False, True, True]
