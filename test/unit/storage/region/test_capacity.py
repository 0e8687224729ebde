"""A capacity that changes while the store is open, beside pins."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from kit.faulty import FaultyDevice
from kit.runs import make_run, of
from kit.tiers import load, open_region, store
from kit.waiting import TIMEOUT_S, drained, eventually, finished
from sglang_tiered.storage.base import NO_TENANT, PinRefusal, Run
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region.device import FileDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sglang_tiered.storage.region import RegionEngine

    Open = Callable[..., RegionEngine]

PAGE = 4096
REGION = 64 * PAGE
CAPACITY = 12 * REGION
PER_REGION = 60  # pages of a run that fills one
A = b"a" * 16


@pytest.fixture
def opens(tmp_path: Path) -> Iterator[Open]:
    """Opens the store, anew if it is open."""
    opened: list[RegionEngine] = []

    def open_it(regions: int = 12, **changes: Any) -> RegionEngine:
        for each in opened:
            each.close()
        sizes = {"capacity_bytes": regions * REGION, "region_bytes": REGION}
        opened.append(open_region(tmp_path, **sizes, **changes))
        return opened[-1]

    yield open_it
    assert drained(opened[-1], TIMEOUT_S)
    eventually(lambda: is_whole(opened[-1]), "hot pages of what was evicted are written again")
    opened[-1].close()


@pytest.fixture
def engine(opens: Open) -> RegionEngine:
    return opens()


def is_whole(engine: RegionEngine) -> bool:
    with contextlib.suppress(AssertionError):
        engine.check_integrity()
        return True
    return False


def run_of(number: int, tenant: bytes = NO_TENANT) -> Run:
    return of(tenant, make_run(number, [PAGE] * PER_REGION))


def fill(engine: RegionEngine, numbers: range, tenant: bytes = NO_TENANT) -> list[Run]:
    runs = [run_of(number, tenant) for number in numbers]
    store(engine, *runs)
    return runs


def held(engine: RegionEngine, runs: list[Run]) -> list[int]:
    return [i for i, run in enumerate(runs) if engine.lookup(run.keys).num_hits == len(run.keys)]


def shrink(engine: RegionEngine, num_regions: int) -> None:
    """What it says that it may take never grows meanwhile: others have what it gave."""
    engine.capacity.set(num_regions * REGION)
    seen = [engine.stats().capacity_bytes]

    def is_over() -> bool:
        seen.append(engine.stats().capacity_bytes)
        return not engine.capacity.room().is_shrinking

    eventually(is_over, "it shrinks")
    assert seen == sorted(seen, reverse=True)


def test_the_oldest_go_and_the_rest_stays(engine: RegionEngine) -> None:
    runs = fill(engine, range(11))
    shrink(engine, 6)
    assert engine.stats().physical_bytes <= engine.stats().capacity_bytes == 6 * REGION
    kept = held(engine, runs)
    assert kept == list(range(11 - len(kept), 11)) and len(kept) >= 5
    fill(engine, range(100, 120))
    assert engine.stats().physical_bytes <= 6 * REGION
    engine.capacity.set(CAPACITY)
    assert engine.stats().capacity_bytes == CAPACITY
    more = fill(engine, range(200, 210))
    assert held(engine, more) == list(range(10))


def test_the_bound_on_pins_follows_the_capacity(engine: RegionEngine) -> None:
    runs = fill(engine, range(10))
    shrink(engine, 4)
    keys = [key for run in runs[8:] for key in run.keys]
    assert isinstance(engine.pin("both", keys), PinRefusal)
    engine.capacity.set(CAPACITY)
    assert not isinstance(engine.pin("both", keys), PinRefusal)


def test_a_shrink_ends_at_pinned_regions(engine: RegionEngine) -> None:
    runs = fill(engine, range(10))
    for number in (1, 4, 7):
        made = engine.pin(f"pin-{number}", runs[number].keys)
        assert not isinstance(made, PinRefusal) and is_true(made, TIMEOUT_S)
    written = engine.stats().bytes_written
    shrink(engine, 2)
    room = engine.capacity.room()
    assert 2 * REGION < room.capacity_bytes < CAPACITY
    assert room.keeps_bytes == room.capacity_bytes, "it says what it still holds"
    assert set(held(engine, runs)) >= {1, 4, 7}
    shrink(engine, 2)
    assert engine.capacity.room().capacity_bytes == room.capacity_bytes
    assert engine.stats().bytes_written - written < 2 * REGION, "pins were written again"
    for number in (1, 4, 7):
        engine.unpin(f"pin-{number}")
    eventually(lambda: engine.capacity.room().keeps_bytes == REGION, "it could give more now")
    shrink(engine, 2)
    assert engine.stats().capacity_bytes == 2 * REGION


@pytest.fixture
def device(tmp_path: Path) -> FaultyDevice:
    return FaultyDevice(FileDevice(tmp_path))


def test_a_pin_amid_an_eviction_keeps_room(opens: Open, device: FaultyDevice) -> None:
    """It is allowed by the bound of before, while the writer thread removes a file."""
    made: list[Any] = []
    engine = opens(60, device=device)
    runs = fill(engine, range(9))
    keys = [key for run in runs[1:] for key in run.keys]

    def pin(operation: str) -> None:
        if operation == "unlink" and not made:
            made.append(engine.pin("late", keys))

    device.before = pin
    shrink(engine, 4)
    assert not isinstance(made[0], PinRefusal) and is_true(made[0], TIMEOUT_S)
    assert engine.pinned_bytes <= engine.pin_bound_bytes
    for number in range(100, 104):
        finished(engine.submit_store(run_of(number)))
    assert engine.lookup(keys).num_hits == len(keys)


def test_saved_pages_are_written_amid_a_shrink(
    opens: Open, device: FaultyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not held in memory, a tenth of all that goes, until it ends."""
    monkeypatch.setattr("sglang_tiered.storage.region.workers._MAX_WRITING_BYTES", 8 * PAGE)
    written = []  # of what was saved, whenever a region goes
    engine = opens(40, device=device)
    for run in fill(engine, range(38)):
        load(engine, run)

    def note(operation: str) -> None:
        if operation == "unlink":
            written.append(engine.stats().num_pages_reinserted)

    device.before = note
    shrink(engine, 4)
    assert drained(engine, TIMEOUT_S)
    assert len(written) >= 34
    waiting = [6 * index - pages for index, pages in enumerate(written[:30])]
    assert max(waiting) < PER_REGION // 2
