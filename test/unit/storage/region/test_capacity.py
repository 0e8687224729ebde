"""A capacity that changes while the store is open: beside pins, loads, erasures and shares."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING, Any

import pytest

from kit.faulty import Fault, FaultyDevice
from kit.runs import NAMESPACE, Blank, make_run, page_data
from kit.waiting import TIMEOUT_S, drained, eventually, finished
from sglang_tiered.storage.base import Erasure, Reason, Run
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.region.pins import PinRefusal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = 4096
REGION = 64 * PAGE
CAPACITY = 12 * REGION
PER_REGION = 60  # pages of a run that fills one
A = b"a" * 16


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RegionEngine]:
    opened = open_engine(tmp_path)
    yield opened
    assert drained(opened, TIMEOUT_S)
    eventually(lambda: is_whole(opened), "hot pages of what was evicted are written again")
    opened.close()


def is_whole(engine: RegionEngine) -> bool:
    with contextlib.suppress(AssertionError):
        engine.check_integrity()
        return True
    return False


def open_engine(directory: Path, **changes: Any) -> RegionEngine:
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "capacity_bytes": CAPACITY,
        "region_bytes": REGION,
        "num_threads": 2,
    }
    return RegionEngine(directory, **(options | changes))


def run_of(number: int, tenant: bytes = bytes(16)) -> Run:
    run = make_run(number, [PAGE] * PER_REGION)
    return Run(run.keys, run.pages, tenant)


def fill(engine: RegionEngine, numbers: range, tenant: bytes = bytes(16)) -> list[Run]:
    runs = [run_of(number, tenant) for number in numbers]
    for run in runs:
        assert set(finished(engine.submit_store(run))) == {Reason.OK}
    return runs


def held(engine: RegionEngine, runs: list[Run]) -> list[int]:
    return [i for i, run in enumerate(runs) if engine.lookup(run.keys).num_hits == len(run.keys)]


def shrink(engine: RegionEngine, nbytes: int) -> None:
    engine.capacity.set(nbytes)
    eventually(lambda: not engine.capacity.room().is_shrinking, "it shrinks")


def test_the_oldest_go_and_the_rest_stays(engine: RegionEngine) -> None:
    runs = fill(engine, range(11))
    shrink(engine, 6 * REGION)
    stats = engine.stats()
    assert stats.capacity_bytes == 6 * REGION
    assert stats.physical_bytes <= 6 * REGION
    kept = held(engine, runs)
    assert kept == list(range(11 - len(kept), 11)) and len(kept) >= 5
    fill(engine, range(100, 120))
    assert engine.stats().physical_bytes <= 6 * REGION
    engine.capacity.set(CAPACITY)
    assert engine.stats().capacity_bytes == CAPACITY
    more = fill(engine, range(200, 210))
    assert held(engine, more) == list(range(10))


def test_capacity_never_grows_while_it_shrinks(engine: RegionEngine) -> None:
    fill(engine, range(11))
    jobs = [engine.submit_store(run_of(number)) for number in range(50, 90)]
    engine.capacity.set(4 * REGION)
    seen = []
    while engine.capacity.room().is_shrinking:
        seen.append(engine.stats().capacity_bytes)
    for job in jobs:
        finished(job)
    assert seen == sorted(seen, reverse=True)
    assert engine.stats().capacity_bytes == 4 * REGION
    assert engine.stats().physical_bytes <= 4 * REGION


def test_a_shrink_ends_at_pinned_regions(engine: RegionEngine, blank: Blank) -> None:
    runs = fill(engine, range(10))
    for number in (1, 4, 7):
        made = engine.pin(f"pin-{number}", runs[number].keys)
        assert not isinstance(made, PinRefusal) and is_true(made, TIMEOUT_S)
    written = engine.stats().bytes_written
    shrink(engine, 2 * REGION)
    room = engine.capacity.room()
    assert 2 * REGION < room.capacity_bytes < CAPACITY
    assert room.keeps_bytes == room.capacity_bytes, "it says what it still holds"
    assert set(held(engine, runs)) >= {1, 4, 7}
    shrink(engine, 2 * REGION)
    assert engine.capacity.room().capacity_bytes == room.capacity_bytes
    assert engine.stats().bytes_written - written < 2 * REGION, "pins were written again"
    for number in (1, 4, 7):
        engine.unpin(f"pin-{number}")
    eventually(lambda: engine.capacity.room().keeps_bytes == REGION, "it could give more now")
    shrink(engine, 2 * REGION)
    assert engine.stats().capacity_bytes == 2 * REGION


def test_the_bound_on_pins_follows_the_capacity(engine: RegionEngine) -> None:
    runs = fill(engine, range(10))
    shrink(engine, 4 * REGION)
    keys = [key for run in runs[8:] for key in run.keys]
    assert isinstance(engine.pin("both", keys), PinRefusal)
    engine.capacity.set(CAPACITY)
    assert not isinstance(engine.pin("both", keys), PinRefusal)


def test_a_load_under_way_ends_whole(engine: RegionEngine, blank: Blank) -> None:
    runs = fill(engine, range(11))
    targets = [blank(run) for run in runs]
    jobs = [engine.submit_load(target) for target in targets]
    shrink(engine, 2 * REGION)
    for run, target, job in zip(runs, targets, jobs, strict=True):
        assert set(finished(job)) == {Reason.OK}
        assert page_data(target) == page_data(run)
    eventually(lambda: engine.stats().physical_bytes <= 2 * REGION, "readers let go")


def test_an_erasure_amid_a_shrink_is_durable(tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    runs = fill(engine, range(11))
    engine.capacity.set(5 * REGION)
    gone = engine.erase(Erasure(runs[10].keys))
    assert is_true(gone, TIMEOUT_S)
    eventually(lambda: not engine.capacity.room().is_shrinking, "it shrinks")
    engine.close()
    again = open_engine(tmp_path, capacity_bytes=5 * REGION)
    assert again.lookup(runs[10].keys).num_hits == 0
    assert held(again, runs[8:10]) == [0, 1]
    again.close()


def test_a_tenants_share_is_of_today(tmp_path: Path) -> None:
    engine = open_engine(tmp_path, max_tenant_bytes=CAPACITY // 2)
    fill(engine, range(4), A)
    shrink(engine, 4 * REGION)
    fill(engine, range(10, 16), A)
    (usage,) = [each for each in engine.tenants(9) if each.tenant == A]
    assert usage.physical_bytes <= 2 * REGION
    engine.close()


def test_what_it_wants_and_how_cold_it_is(tmp_path: Path, blank: Blank) -> None:
    now = 100.0
    engine = open_engine(tmp_path, clock=lambda: now)
    assert engine.capacity.room().wants_bytes == 0, "it is not written to"
    runs = fill(engine, range(12))
    assert engine.capacity.room().wants_bytes >= 3 * REGION
    assert engine.flush(TIMEOUT_S)  # a write under way would seem to hang
    now = 170.0
    assert engine.capacity.room().wants_bytes == 0, "nor is it now"
    first = held(engine, runs)[0]
    assert engine.capacity.room().coldest_s == pytest.approx(70.0)
    finished(engine.submit_load(blank(runs[first])))
    assert engine.capacity.room().coldest_s == 0.0
    engine.close()


def test_a_pin_amid_an_eviction_keeps_room(tmp_path: Path) -> None:
    """It is allowed by the bound of before, while the writer thread removes a file."""
    made: list[Any] = []
    device = FaultyDevice(FileDevice(tmp_path))
    engine = open_engine(tmp_path, capacity_bytes=60 * REGION, device=device)
    runs = fill(engine, range(9))
    keys = [key for run in runs[1:] for key in run.keys]

    def pin(operation: str) -> None:
        if operation == "unlink" and not made:
            made.append(engine.pin("late", keys))

    device.before = pin
    shrink(engine, 4 * REGION)
    assert not isinstance(made[0], PinRefusal) and is_true(made[0], TIMEOUT_S)
    assert engine.pinned_bytes <= engine.pin_bound_bytes
    for number in range(100, 104):
        finished(engine.submit_store(run_of(number)))
    assert engine.lookup(keys).num_hits == len(keys)
    engine.close()


def test_saved_pages_are_written_amid_a_shrink(
    tmp_path: Path, blank: Blank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not held in memory, a tenth of all that goes, until it ends."""
    monkeypatch.setattr("sglang_tiered.storage.region.store_worker._MAX_WRITING_BYTES", 8 * PAGE)
    written = []  # of what was saved, whenever a region goes
    device = FaultyDevice(FileDevice(tmp_path))
    engine = open_engine(tmp_path, capacity_bytes=40 * REGION, device=device)
    runs = fill(engine, range(38))
    for run in runs:
        finished(engine.submit_load(blank(run)))

    def note(operation: str) -> None:
        if operation == "unlink":
            written.append(engine.stats().num_pages_reinserted)

    device.before = note
    shrink(engine, 4 * REGION)
    assert drained(engine, TIMEOUT_S)
    assert len(written) >= 34
    waiting = [6 * index - pages for index, pages in enumerate(written[:30])]
    assert max(waiting) < PER_REGION // 2
    engine.close()


def test_asking_again_forgets_no_failure(tmp_path: Path) -> None:
    """As each tick does, or a shrink whose victims stay would try all of them."""
    device = FaultyDevice(FileDevice(tmp_path))
    engine = open_engine(tmp_path, capacity_bytes=22 * REGION, device=device)
    fill(engine, range(20))
    device.faults = [Fault(0, "unlink", times=1000, error=errno.EIO)]

    def ask(operation: str) -> None:
        if operation == "unlink":
            engine.capacity.set(4 * REGION)

    device.before = ask
    before = device.calls.count("unlink")
    shrink(engine, 4 * REGION)
    assert 1 < device.calls.count("unlink") - before < 10
    device.faults, device.before = [], None
    engine.close()
