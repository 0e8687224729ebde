"""What a page server gives away out of a region store."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_peers import Wanted, page_client, page_server

from kit.faulty import Fault, FaultyDevice
from kit.runs import (
    NAMESPACE,
    OTHER_NAMESPACE,
    blank,
    make_run,
    make_soft_run,
    page_data,
    soft_encoding,
)
from kit.tiers import open_region, store
from kit.waiting import TIMEOUT_S, eventually, finished
from sglang_tiered.checksummed import page_checksum
from sglang_tiered.sharing.page_source import BufferPool, PageSource
from sglang_tiered.sharing.pages.link import PageOutcome
from sglang_tiered.storage.base import Erasure, Reason, Run
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice

SIZES = (4096, 100, 65_536, 5000, (4096, 1, 8191))


@pytest.fixture
def region(tmp_path: Path) -> Iterator[RegionEngine]:
    engine = open_region(tmp_path / "store", region_bytes=1 << 20)
    yield engine
    engine.close()


@pytest.fixture
def source(region: RegionEngine) -> PageSource:
    return PageSource.of_region(region, max_free_bytes=1 << 20)


def read(source: PageSource, keys: Any, lengths: Any) -> list[bytes | None]:
    """What is given, with checksums that fit."""
    ended, found = threading.Event(), []

    def done(pages: Any) -> None:
        found.append(pages)
        ended.set()

    source.read(keys, lengths, done)
    assert ended.wait(TIMEOUT_S)
    taken = []
    for key, place in zip(keys, found[0].places, strict=True):
        data = place and bytes(found[0].data[place.offset : place.offset + place.length])
        assert place is None or page_checksum(NAMESPACE, key, [data]) == place.checksum
        taken.append(data)
    found[0].release()
    return taken


def stored(region: RegionEngine, run: Run) -> list[int]:
    """Store pages, and return their lengths."""
    store(region, run)
    return [sum(segment.nbytes for segment in page) for page in run.pages]


def test_stored_pages_are_served_and_others_are_not(
    region: RegionEngine, source: PageSource
) -> None:
    """Of other keys, or another length. They do not count as loads."""
    run = make_run(1, SIZES)
    lengths = stored(region, run)
    for _ in range(3):
        assert read(source, run.keys, lengths) == page_data(run)
    stats = region.stats()
    assert (stats.num_pages_loaded, stats.bytes_loaded) == (0, 0)
    assert (stats.num_pages_copied, stats.bytes_copied) == (3 * len(SIZES), 3 * run.num_bytes)
    lengths[1] += 1
    expected: list[bytes | None] = list(page_data(run))
    expected[1] = expected[2] = None
    assert read(source, [*run.keys[:2], b"z" * 32, *run.keys[3:]], lengths) == expected
    assert read(source, [b"z" * 32], [100]) == [None]


def test_encoded_pages_are_given_as_they_were(tmp_path: Path) -> None:
    """Whoever asks, with the checksum of what is sent, and in the length of the page alone."""
    region = open_region(tmp_path / "store", region_bytes=1 << 20, encoding=soft_encoding())
    run = make_soft_run(2, [65_536, 16_384])
    lengths = stored(region, run)
    assert region.stats().stored_bytes < run.num_bytes
    source = PageSource.of_region(region, max_free_bytes=1 << 20)
    assert read(source, run.keys, lengths) == page_data(run)
    assert read(source, run.keys, [lengths[0] + 1, lengths[1] - 1]) == [None, None]
    submit = source._submit

    def change_behind(wanted: Run) -> Any:
        job = submit(wanted)
        assert job.wait(TIMEOUT_S)
        region.set_namespace(OTHER_NAMESPACE)
        return job

    source._submit = change_behind
    assert read(source, run.keys, lengths) == [None, None], "of another namespace, perhaps"
    region.close()


@pytest.mark.parametrize("what", ["erased", "erased before the read", "damaged", "closed"])
def test_what_no_load_would_get_is_not_served(
    region: RegionEngine, source: PageSource, tmp_path: Path, what: str
) -> None:
    run = make_run(3, [8192, 8192])
    lengths = stored(region, run)
    first, second = page_data(run)
    if what == "damaged":
        (path,) = (tmp_path / "store").glob("region-*")
        path.write_bytes(path.read_bytes().replace(second, b"!" + second[1:]))
    elif what == "closed":
        region.close()
    elif what == "erased":
        assert is_true(region.erase(Erasure()), TIMEOUT_S)
    else:
        submit = source._submit

        def erase_first(wanted: Run) -> Any:
            assert is_true(region.erase(Erasure()), TIMEOUT_S)
            return submit(wanted)

        source._submit = erase_first
    assert read(source, run.keys, lengths) == [first if what == "damaged" else None, None]


def test_pages_are_given_again_after_an_outage(tmp_path: Path) -> None:
    """What cannot be read is a miss. The store hides what it tried, and nothing else is kept."""
    (tmp_path / "store").mkdir(mode=0o700)
    device = FaultyDevice(FileDevice(tmp_path / "store"))
    region, run = open_region(tmp_path / "store", device=device), make_run(1, SIZES)
    pages = dict(zip(run.keys, map(bytes, stored(region, run)), strict=True))
    with page_server({}, namespace=NAMESPACE) as (server, _), page_client() as client:
        server._source = PageSource.of_region(region, max_free_bytes=1 << 20)
        device.faults = [Fault(at=0, operation="readv", times=1000, error=errno.EIO)]
        wanted = Wanted(client, server.port, pages, namespace=NAMESPACE)
        assert wanted.wait() == [PageOutcome.MISS] * len(pages)
        device.faults = []
        wanted = Wanted(client, server.port, pages, namespace=NAMESPACE)
        held = [page is not None for page in region.view.find(list(pages))]
        assert any(held)
        assert wanted.wait() == [PageOutcome.OK if one else PageOutcome.MISS for one in held]
        eventually(lambda: server.held_bytes == 0)
    region.close()


def test_only_requests_here_hold_back_others(tmp_path: Path) -> None:
    """Reads for others that wait for a reader are no reason to begin no more of them."""
    (tmp_path / "store").mkdir(mode=0o700)
    device, let_go = FaultyDevice(FileDevice(tmp_path / "store")), threading.Event()
    region, run = open_region(tmp_path / "store", device=device), make_run(1, SIZES)
    lengths = stored(region, run)
    source, answered = PageSource.of_region(region, max_free_bytes=1 << 20), list[Any]()
    device.before = lambda operation, *_: None if operation != "readv" else let_go.wait(TIMEOUT_S)
    for _ in range(32):
        source.read(run.keys, lengths, answered.append)
    assert not source.is_pressed
    jobs = [region.submit_load(blank(run)) for _ in range(32)]
    assert source.is_pressed
    let_go.set()
    assert all(finished(job) == [Reason.OK] * len(SIZES) for job in jobs)
    eventually(lambda: len(answered) == 32)
    region.close()


def test_idle_read_memory_is_bounded() -> None:
    memory = BufferPool(max_free_bytes=1 << 20)
    for buffer in [memory.borrow_buffer(300_000) for _ in range(9)]:
        memory.return_buffer(buffer)
    assert 0 < memory._free_bytes <= 1 << 20


def test_a_read_that_fails_keeps_nobody_waiting() -> None:
    def fail(run: Run) -> Any:
        source.read([b"k" * 32], [100], found.append)
        assert not found
        raise RuntimeError("no memory")

    found: list[Any] = []
    source = PageSource(
        fail, namespace=lambda: NAMESPACE, max_free_bytes=1 << 20, generation=lambda: 0
    )
    with pytest.raises(RuntimeError, match="no memory"):
        source.read([b"k" * 32], [100], found.append)
    assert [pages.places for pages in found] == [[None], [None]]
    for pages in found:
        pages.release()
    assert not source._reads
