"""What RegionEngine does beyond the contract every engine keeps."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from kit.faulty import FaultyDevice
from kit.waiting import drained, finished
from sglang_tiered.storage.base import JobKind, Reason, Run, Stop
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.runs import Blank, MakeRun


TIMEOUT_S = 20.0
REGION = 64 * 1024
OLD, NEW = b"\x11" * 32, b"\x22" * 32


class Gate:
    """Holds the store inside its next ``writev`` until opened, or in the one after ``passes``."""

    def __init__(self) -> None:
        self.passes = 0
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, operation: str) -> None:
        if operation != "writev":
            return
        if self.passes:
            self.passes -= 1
        else:
            self.entered.set()
            assert self.opened.wait(TIMEOUT_S)


def options(**changes: Any) -> dict[str, Any]:
    return {"namespace": OLD, "capacity_bytes": 4 * REGION, "region_bytes": REGION} | changes


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def gated(tmp_path: Path, gate: Gate) -> Iterator[RegionEngine]:
    device = FaultyDevice(FileDevice(tmp_path), before=gate)
    engine = RegionEngine(
        tmp_path, device=device, **options(num_threads=2, max_queued_store_bytes=20_000)
    )
    yield engine
    gate.opened.set()
    assert drained(engine, TIMEOUT_S)
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"namespace": b"short"},
        {"region_bytes": 5000},
        {"region_bytes": 4096},
        {"capacity_bytes": REGION - 1},
        {"num_threads": 1},
    ],
)
def test_sizes_that_cannot_work(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"region_bytes|namespace|num_threads"):
        RegionEngine(tmp_path / "s", **options(**wrong))
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("first", [[12_000], [4096] * 10])
def test_a_queue_takes_the_leading_pages_that_fit(
    gated: RegionEngine, gate: Gate, make_run: MakeRun, blank: Blank, first: list[int]
) -> None:
    """An empty one takes a store whole. What it has taken is pending until it is written."""
    job = gated.submit_store(make_run(1, first))
    assert gate.entered.wait(TIMEOUT_S)
    assert gated.stats().queued_store_bytes == sum(first)
    run = make_run(2, [4096, 3000, 4096, 100])  # the last would fit, and be of no use
    num_taken = 2 if sum(first) < 20_000 else 0
    second = gated.submit_store(run)
    if num_taken:
        assert gated.lookup(run.keys) == (0, Stop.PENDING)
        assert finished(gated.submit_load(blank(run))) == [Reason.MISS] * 4
        assert (
            finished(gated.submit_store(Run(run.keys[:2], run.pages[:2]))) == [Reason.DUPLICATE] * 2
        )
    assert gated.lookup(run.keys[2:]).stop is Stop.MISS
    gate.opened.set()
    assert finished(job) == [Reason.OK] * len(first)
    assert finished(second) == [Reason.OK] * num_taken + [Reason.REJECTED] * (4 - num_taken)
    assert gated.stats().reasons[JobKind.STORE, Reason.REJECTED] == 4 - num_taken
    expected = [Reason.DUPLICATE] * num_taken + [Reason.OK] * (4 - num_taken)
    assert finished(gated.submit_store(run)) == expected
    assert finished(gated.submit_load(blank(run))) == [Reason.OK] * 4


def test_a_large_store_does_not_await_hanging_devices(
    tmp_path: Path, gate: Gate, make_run: MakeRun
) -> None:
    engine = RegionEngine(
        tmp_path,
        device=FaultyDevice(FileDevice(tmp_path), before=gate),
        **options(max_queued_store_bytes=20_000, io_timeout_s=0.2),
    )
    large = engine.submit_store(make_run(1, [12_000] * 200))
    assert gate.entered.wait(TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    while engine.lookup(large.run.keys).stop is not Stop.UNHEALTHY:
        assert time.monotonic() < deadline, "a device that hangs goes unnoticed"
    assert finished(large) == [Reason.REJECTED] * 200
    assert engine.stats().queued_store_bytes == 0
    gate.opened.set()
    engine.close()


class Unsearched(deque[Any]):
    """Extents under way of which only the oldest may be looked at."""

    def __iter__(self) -> Any:
        raise AssertionError("a store got its place by a walk through all before it")


def test_placing_a_store_walks_through_no_others(
    gated: RegionEngine, gate: Gate, make_run: MakeRun
) -> None:
    gate.passes = 1  # the header of the region
    gated._state.writes = Unsearched()
    jobs = [gated.submit_store(make_run(1, [4096]))]
    assert gate.entered.wait(TIMEOUT_S)
    jobs += [gated.submit_store(make_run(seed, [4096])) for seed in (2, 3)]
    gate.opened.set()
    assert [finished(job) for job in jobs] == [[Reason.OK]] * 3
    with gated._state.lock:
        assert not gated._state.writes
        gated._state.writes = deque()


def test_loads_do_not_wait_behind_stores(
    gated: RegionEngine, gate: Gate, make_run: MakeRun, blank: Blank
) -> None:
    gate.opened.set()
    held = make_run(1, [4096])
    finished(gated.submit_store(held))
    gate.opened.clear()
    gate.entered.clear()
    waiting = gated.submit_store(make_run(2, [4096]))
    assert gate.entered.wait(TIMEOUT_S)
    assert finished(gated.submit_load(blank(held))) == [Reason.OK]
    assert not waiting.done


def test_a_store_of_the_old_namespace_stays_invisible(
    gated: RegionEngine, gate: Gate, make_run: MakeRun, blank: Blank, tmp_path: Path
) -> None:
    run = make_run(1, [4096])
    job = gated.submit_store(run)
    assert gate.entered.wait(TIMEOUT_S)
    switch = threading.Thread(target=gated.set_namespace, args=(NEW,))
    switch.start()
    switch.join(TIMEOUT_S)
    assert not switch.is_alive(), "weights change on the scheduler's thread, whatever the disk does"
    gate.opened.set()
    assert finished(job) == [Reason.OK]
    assert gated.lookup(run.keys) == (0, Stop.MISS)
    same_key = Run(run.keys, make_run(2, [4096]).pages)
    assert finished(gated.submit_store(same_key)) == [Reason.OK]
    target = blank(run)
    assert finished(gated.submit_load(target)) == [Reason.OK]
    assert bytes(target.pages[0][0]) == bytes(same_key.pages[0][0])
    gated.close()
    reopened = RegionEngine(tmp_path, **options())
    target = blank(run)
    assert finished(reopened.submit_load(target)) == [Reason.OK]
    assert bytes(target.pages[0][0]) == bytes(run.pages[0][0])
    reopened.close()


@pytest.mark.parametrize("passes", [0, 1])
def test_close_finishes_only_what_is_being_written(
    gated: RegionEngine, gate: Gate, make_run: MakeRun, passes: int
) -> None:
    gate.passes = passes  # the first write is the header of the region
    first = gated.submit_store(make_run(1, [4096]))
    assert gate.entered.wait(TIMEOUT_S)
    second = gated.submit_store(make_run(2, [4096]))
    closing = threading.Thread(target=gated.close)
    closing.start()
    if not passes:
        assert finished(first) == [Reason.CANCELLED]
    assert finished(second) == [Reason.CANCELLED]
    gate.opened.set()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert finished(first) == [Reason.OK if passes else Reason.CANCELLED]


def test_largest_page_and_one_byte_more(tmp_path: Path, make_run: MakeRun, blank: Blank) -> None:
    engine = RegionEngine(tmp_path, **options())
    largest = REGION - 4 * 4096
    run = make_run(1, [largest, largest + 1])
    assert finished(engine.submit_store(run)) == [Reason.OK, Reason.NO_SPACE]
    assert finished(engine.submit_load(blank(run))) == [Reason.OK, Reason.MISS]
    engine.close()
    reopened = RegionEngine(tmp_path, **options())
    assert reopened.lookup(run.keys).num_hits == 1
    reopened.close()


def test_capacity_of_a_single_region(tmp_path: Path, make_run: MakeRun, blank: Blank) -> None:
    engine = RegionEngine(tmp_path, **options(capacity_bytes=REGION))
    for seed in range(5):
        run = make_run(seed, [12_288] * 3)
        assert finished(engine.submit_store(run)) == [Reason.OK] * 3
        assert finished(engine.submit_load(blank(run))) == [Reason.OK] * 3
        assert engine.stats().physical_bytes == REGION
    engine.check_integrity()
    engine.close()
