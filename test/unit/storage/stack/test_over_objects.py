"""Two stacks over one directory of objects: what one stored the other serves and keeps."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kit.runs import NAMESPACE, Blank, MakeRun, PageData
from kit.waiting import TIMEOUT_S, drained, eventually, finished
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
    eventually(lambda: second.stack_stats().num_promoted == 4, "nothing was promoted")
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
