"""What ``TierEngine`` promises of lookups and loads, kept by a tier of other servers: pages stored
in one server's region store, looked up and loaded in another."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from peer_child import Sharer, sharer
from redis_server import RedisServer

from sglang_tiered.storage.base import Job, JobKind, LookupResult, Reason, Run, Stop
from sglang_tiered.storage.region.device import aligned_buffer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.runs import Blank, MakeRun, PageData

pytestmark = pytest.mark.timeout(60)


TIMEOUT_S = 20.0
ODD_SIZES = (1, 4095, 4096, 4097, 65536, (100, 3996), (4096, 1, 8191), (0, 7), 12288)


class Pair:
    """Stores there, loads here."""

    def __init__(self, holder: Sharer, own: Sharer) -> None:
        self.holder, self.tier = holder, own.tier

    def store(self, run: Run) -> None:
        self.holder.store(run)
        assert self.holder.tier.refresh(TIMEOUT_S)
        assert self.tier.refresh(TIMEOUT_S)

    def load(self, run: Run) -> list[Reason]:
        return finished(self.tier.submit_load(run)).reasons


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def pair(redis: RedisServer, tmp_path: Path) -> Iterator[Pair]:
    namespace = threading.get_native_id().to_bytes(16, "little") + tmp_path.name.encode()[-16:]
    with (
        sharer(redis.url, tmp_path / "holder", namespace=namespace.ljust(32, b"-")) as holder,
        sharer(redis.url, tmp_path / "own", namespace=namespace.ljust(32, b"-")) as own,
    ):
        yield Pair(holder, own)


def finished(job: Job) -> Job:
    assert job.wait(TIMEOUT_S), "the job did not finish"
    return job


def select(run: Run, positions: list[int]) -> Run:
    return Run(tuple(run.keys[i] for i in positions), tuple(run.pages[i] for i in positions))


def test_what_was_stored_comes_back(
    pair: Pair, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    run = make_run(1, ODD_SIZES)
    pair.store(run)
    assert pair.tier.lookup(run.keys) == LookupResult(run.num_pages, Stop.END)
    target = blank(run)
    assert pair.load(target) == [Reason.OK] * run.num_pages
    assert page_data(target) == page_data(run)


def test_segmentation_may_differ_between_store_and_load(pair: Pair, make_run: MakeRun) -> None:
    run = make_run(2, [(5000, 5000)])
    pair.store(run)
    buffer = memoryview(bytearray(10_003))
    target = Run(run.keys, ((buffer[3:9], buffer[9:7000], buffer[7000:]),))
    assert pair.load(target) == [Reason.OK]
    assert bytes(buffer[3:]) == b"".join(run.pages[0])
    assert bytes(buffer[:3]) == b"\0\0\0", "a byte beside the page was touched"


def test_aligned_pages_of_one_pool(pair: Pair, make_run: MakeRun) -> None:
    size, count = 8192, 40
    pool = aligned_buffer(size * count)
    source = make_run(3, [size] * count)
    pair.store(source)
    pages = tuple((pool[i * size : (i + 1) * size],) for i in range(count))
    assert set(pair.load(Run(source.keys, pages))) == {Reason.OK}
    assert bytes(pool) == b"".join(page[0] for page in source.pages)


def test_lookup_counts_leading_hits_only(pair: Pair, make_run: MakeRun) -> None:
    run = make_run(4, [4096] * 5)
    pair.store(select(run, [0, 1, 3, 4]))
    assert pair.tier.lookup(run.keys) == LookupResult(2, Stop.MISS)
    assert pair.tier.lookup(run.keys[3:]) == LookupResult(2, Stop.END)
    assert pair.tier.lookup(run.keys[2:]) == LookupResult(0, Stop.MISS)
    assert pair.tier.lookup(()) == LookupResult(0, Stop.END)
    assert pair.tier.contains(run.keys) == [True, True, False, True, True]


def test_missing_page_in_the_middle_is_a_miss_and_its_neighbours_load(
    pair: Pair, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    run = make_run(5, [4096, 5000, 4096, 100])
    pair.store(select(run, [0, 2, 3]))
    target = blank(run)
    assert pair.load(target) == [Reason.OK, Reason.MISS, Reason.OK, Reason.OK]
    assert page_data(target)[1] == b"\xa5" * 5000
    assert page_data(target)[2:] == page_data(run)[2:]


def test_buffer_of_wrong_length_is_a_miss_and_untouched(
    pair: Pair, make_run: MakeRun, page_data: PageData
) -> None:
    run = make_run(6, [4096])
    pair.store(run)
    for nbytes in (4095, 4097, 8192):
        target = Run(run.keys, ((memoryview(bytearray(b"\xa5" * nbytes)),),))
        assert pair.load(target) == [Reason.MISS]
        assert page_data(target) == [b"\xa5" * nbytes]
        pair.store(make_run(60 + nbytes, [10]))  # a change, so that the page is told of anew


def test_poll_reports_each_job_once(pair: Pair, make_run: MakeRun, blank: Blank) -> None:
    run = make_run(10, [4096])
    pair.store(run)
    job = finished(pair.tier.submit_load(blank(run)))
    assert job.kind is JobKind.LOAD
    assert pair.tier.poll() == [job]
    assert pair.tier.poll() == []


def test_cancelled_job_still_finishes(pair: Pair, make_run: MakeRun, blank: Blank) -> None:
    run = make_run(11, [65_536] * 64)
    pair.store(run)
    job = pair.tier.submit_load(blank(run))
    job.cancel()
    assert set(finished(job).reasons) <= {Reason.OK, Reason.CANCELLED}


def test_loads_from_many_threads(
    pair: Pair, make_run: MakeRun, blank: Blank, page_data: PageData
) -> None:
    runs = [make_run(20 + number, [10_000] * 20) for number in range(8)]
    for run in runs:
        pair.holder.store(run)
    pair.store(make_run(99, [1]))
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(5):
            target = blank(runs[number])
            if set(pair.load(target)) != {Reason.OK} or page_data(target) != page_data(
                runs[number]
            ):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not wrong
    assert pair.tier.drain(TIMEOUT_S)


def test_a_callback_sees_complete_reasons(pair: Pair, make_run: MakeRun, blank: Blank) -> None:
    run = make_run(12, [4096] * 3)
    pair.store(run)
    seen: list[list[Reason]] = []
    job = pair.tier.submit_load(blank(run))
    job.call_at_end(lambda job: seen.append(list(job.reasons)))
    finished(job)
    assert seen == [[Reason.OK] * 3]
