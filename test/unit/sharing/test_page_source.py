"""What a page server gives away out of a region store."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from kit.runs import NAMESPACE, MakeRun
from sglang_tiered.checksummed import page_checksum
from sglang_tiered.sharing.page_source import BufferPool, PageSource
from sglang_tiered.storage.base import Erasure, Reason, Run
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SIZES = (4096, 100, 65_536, 5000, (4096, 1, 8191))


@pytest.fixture
def region(tmp_path: Path) -> Iterator[RegionEngine]:
    engine = RegionEngine(
        tmp_path / "store",
        namespace=NAMESPACE,
        capacity_bytes=1 << 22,
        region_bytes=1 << 20,
        num_threads=2,
    )
    yield engine
    engine.close()


def read(source: PageSource, keys: Any, lengths: Any) -> list[bytes | None]:
    ended, found = threading.Event(), []

    def done(pages: Any) -> None:
        found.append(pages)
        ended.set()

    source.read(keys, lengths, done)
    assert ended.wait(20.0)
    (pages,) = found
    if pages is None:
        return [None] * len(keys)
    taken = []
    for key, place in zip(keys, pages.places, strict=True):
        if place is None:
            taken.append(None)
            continue
        data = bytes(pages.data[place.offset : place.offset + place.length])
        assert page_checksum(NAMESPACE, key, [data]) == place.checksum
        taken.append(data)
    pages.release()
    return taken


def lengths_of(run: Run) -> list[int]:
    return [sum(segment.nbytes for segment in page) for page in run.pages]


def stored(region: RegionEngine, run: Run) -> Run:
    job = region.submit_store(run)
    assert job.wait(20.0)
    assert set(job.reasons) == {Reason.OK}
    return run


def test_pages_are_served_with_their_stored_checksum(
    region: RegionEngine, make_run: MakeRun, page_data: Callable[[Run], list[bytes]]
) -> None:
    run = stored(region, make_run(1, SIZES))
    source = PageSource.of_region(region, max_free_bytes=1 << 20)
    for _ in range(3):
        assert read(source, run.keys, lengths_of(run)) == page_data(run)


def test_pages_for_other_servers_are_not_loads(region: RegionEngine, make_run: MakeRun) -> None:
    run = stored(region, make_run(1, SIZES))
    assert None not in read(
        PageSource.of_region(region, max_free_bytes=1 << 20), run.keys, lengths_of(run)
    )
    stats = region.stats()
    assert (stats.num_pages_loaded, stats.bytes_loaded) == (0, 0)
    assert (stats.num_pages_copied, stats.bytes_copied) == (len(SIZES), run.num_bytes)


def test_missing_or_resized_page_is_not_served(
    region: RegionEngine, make_run: MakeRun, page_data: Callable[[Run], list[bytes]]
) -> None:
    run = stored(region, make_run(2, SIZES))
    source = PageSource.of_region(region, max_free_bytes=1 << 20)
    lengths = lengths_of(run)
    lengths[1] += 1
    keys = [run.keys[0], run.keys[1], b"z" * 32, *run.keys[3:]]
    expected: list[bytes | None] = list(page_data(run))
    expected[1] = expected[2] = None
    assert read(source, keys, lengths) == expected
    assert read(source, [b"z" * 32], [100]) == [None]


def test_page_damaged_on_disk_is_not_served(
    region: RegionEngine, make_run: MakeRun, tmp_path: Path
) -> None:
    run = stored(region, make_run(3, [8192, 8192]))
    (path,) = (tmp_path / "store").glob("region-*")
    data = bytearray(path.read_bytes())
    at = data.find(bytes(run.pages[1][0][:64]))
    assert at > 0
    data[at] ^= 1
    path.write_bytes(data)
    source = PageSource.of_region(region, max_free_bytes=1 << 20)
    first, second = read(source, run.keys, lengths_of(run))
    assert first == bytes(run.pages[0][0])
    assert second is None


def test_purged_or_closed_store_serves_nothing(region: RegionEngine, make_run: MakeRun) -> None:
    run = stored(region, make_run(4, [4096, 4096]))
    source = PageSource.of_region(region, max_free_bytes=1 << 20)
    is_true(region.erase(Erasure()), 20.0)
    assert read(source, run.keys, [4096, 4096]) == [None, None]
    stored(region, run)
    region.close()
    assert read(source, run.keys, [4096, 4096]) == [None, None]


def test_page_evicted_before_the_read_is_not_served(
    region: RegionEngine, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stored(region, make_run(5, [4096, 4096]))
    load = region.submit_load

    def purge_first(wanted: Run, **how: Any) -> Any:
        is_true(region.erase(Erasure()), 20.0)
        return load(wanted, **how)

    monkeypatch.setattr(region, "submit_load", purge_first)
    source = PageSource.of_region(region, max_free_bytes=1 << 20)
    assert read(source, run.keys, [4096, 4096]) == [None, None]


def test_a_read_that_fails_keeps_nobody_waiting() -> None:
    def fail(run: Run) -> Any:
        source.read([b"k" * 32], [100], found.append)
        assert not found
        raise RuntimeError("no memory")

    found: list[Any] = []
    source = PageSource(fail, max_free_bytes=1 << 20, generation=lambda: 0)
    with pytest.raises(RuntimeError, match="no memory"):
        source.read([b"k" * 32], [100], found.append)
    assert [pages.places for pages in found] == [[None], [None]]
    for pages in found:
        pages.release()
    assert not source._reads


def test_idle_read_memory_is_bounded() -> None:
    memory = BufferPool(max_free_bytes=1 << 20)
    first = memory.borrow_buffer(300_000)
    assert 300_000 <= first.nbytes <= 375_000
    memory.return_buffer(first)
    assert memory.borrow_buffer(first.nbytes - 1) is first
    many = [memory.borrow_buffer(300_000) for _ in range(20)]
    for buffer in many:
        memory.return_buffer(buffer)
    assert sum(map(len, (memory.borrow_buffer(300_000) for _ in range(20)))) > 0
    assert memory._free_bytes == 0
    for buffer in many:
        memory.return_buffer(buffer)
    assert memory._free_bytes <= 1 << 20
