"""Stores that share one budget: who is busy has it, sums hold, and a death gives back."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kit.runs import NAMESPACE, blank, make_run
from kit.waiting import TIMEOUT_S, finished
from sglang_tiered.config import NvmeConfig, TieredConfig, TierMode
from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.storage.machine_budget import MachineBudget, check_budget
from sglang_tiered.storage.base import PinRefusal, Reason, Run
from sglang_tiered.storage.machine_budget import BudgetRecords, Table
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.format import region_name
from sglang_tiered.storage.region.reclaim import CapacityControl

PAGE = 4096
REGION = 64 * PAGE
TOTAL = 40 * REGION
FLOOR = 4 * REGION
PER_REGION = 60


class Store:
    """A store with its part of the budget, whose ticks the test gives; time passes by them."""

    now = 0.0

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.is_over = name, False
        self._runs: dict[int, Run] = {}
        self.budget = MachineBudget(
            folder / "budget",
            folder / name,
            total_bytes=TOTAL,
            floor_bytes=FLOOR,
            region_bytes=REGION,
        )
        self.engine = RegionEngine(
            folder / name,
            namespace=NAMESPACE,
            capacity_bytes=self.budget.capacity_bytes,
            most_bytes=TOTAL,
            region_bytes=REGION,
            num_threads=2,
            clock=lambda: Store.now,
        )
        self.budget._store = self.engine.capacity  # without its thread

    def run_of(self, number: int) -> Run:
        if number not in self._runs:
            seed = 1000 * ord(self.name) + number
            self._runs[number] = make_run(seed, [PAGE] * PER_REGION)
        return self._runs[number]

    def visit(self, number: int) -> bool:
        """Load a conversation, or store it where it is not held; true for a hit."""
        run = self.run_of(number)
        if self.holds(number):
            return set(finished(self.engine.submit_load(blank(run)))) == {Reason.OK}
        assert set(finished(self.engine.submit_store(run))) <= {Reason.OK, Reason.DUPLICATE}
        return False

    def holds(self, number: int) -> bool:
        keys = self.run_of(number).keys
        return self.engine.lookup(keys).num_hits == len(keys)

    @property
    def capacity(self) -> int:
        return self.engine.stats().capacity_bytes

    def end(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        self.budget.close()
        self.engine.close()
        self.budget.leave()


def tick(*stores: Store) -> None:
    Store.now += 0.5
    for store in stores:
        store.budget.tick()
        assert sum(each.capacity for each in stores) <= TOTAL


def rounds(busy: Store, stores: tuple[Store, ...], number: int, num_rounds: int) -> float:
    """The hit rate of the last of so many rounds over its conversations."""
    hits = 0
    for _ in range(num_rounds):
        hits = 0
        for conversation in range(number):
            hits += busy.visit(conversation)
            tick(*stores)
    return hits / number


OpenStore = Callable[[str], Store]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    opened: list[Store] = []

    def open_store(name: str) -> Store:
        opened.append(Store(tmp_path, name))
        return opened[-1]

    yield open_store
    for store in opened:
        store.end()


@pytest.fixture
def two(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> tuple[Store, Store]:
    """Whose records cover what they have at each step, or a death in between would leave more on
    the disk than the total."""
    both = open_store("a"), open_store("b")
    table_of, set_of, told = BudgetRecords.table, CapacityControl.set, dict[str, int]()

    def look() -> None:
        for store in both:
            held = told.get(store.budget._records.name, TOTAL)
            assert store.is_over or store.capacity <= held, store.name

    @contextlib.contextmanager
    def table(records: BudgetRecords, *arguments: float) -> Iterator[Table]:
        with table_of(records, *arguments) as found:
            yield found
        told.update((name, each.cap_bytes) for name, each in found.records.items())
        look()

    def set_capacity(control: CapacityControl, nbytes: int) -> None:
        set_of(control, nbytes)
        look()

    monkeypatch.setattr(BudgetRecords, "table", table)
    monkeypatch.setattr(CapacityControl, "set", set_capacity)
    return both


def test_the_busy_one_has_what_it_needs(two: tuple[Store, Store]) -> None:
    """1.6 halves of the budget; two fixed halves hold 62.5% of that, and a log in rounds less."""
    for busy in (*two, two[0]):
        assert rounds(busy, two, 32, 3) >= 0.95
        idle = two[1 - two.index(busy)]
        assert idle.capacity >= FLOOR
        assert busy.capacity >= 32 * REGION
        for store in two:
            store.engine.check_integrity()


def test_pins_of_a_lender_are_not_written_again(two: tuple[Store, Store]) -> None:
    a, b = two
    rounds(a, two, 30, 2)
    keys = [a.run_of(number).keys for number in range(0, 30, 3)]
    made = a.engine.pin("mine", [key for each in keys for key in each])
    assert not isinstance(made, PinRefusal) and is_true(made, TIMEOUT_S)
    Store.now += 100
    written = a.engine.stats().bytes_written
    rounds(b, two, 36, 3)
    assert all(a.engine.lookup(each).num_hits == len(each) for each in keys)
    assert a.engine.stats().bytes_written - written < 4 * REGION
    assert b.capacity == TOTAL - a.capacity, "but all that pins do not keep"
    a.engine.unpin("mine")
    rounds(b, two, 36, 2)
    assert a.capacity < 8 * REGION


def test_no_record_gives_above_the_total(open_store: OpenStore) -> None:
    store = open_store("b")
    records = store.budget._records  # as somebody would who writes the table
    with records.table() as table:
        mine = table.records[records.name]
        mine.cap_bytes = mine.due_bytes = 1 << 60
    tick(store)


def test_what_a_dead_store_had_comes_back(two: tuple[Store, Store], open_store: OpenStore) -> None:
    a, b = two
    rounds(a, two, 34, 2)
    assert a.capacity > 30 * REGION
    a.end()
    assert rounds(b, (b,), 34, 3) >= 0.95
    again = open_store("a")
    assert FLOOR <= again.capacity <= TOTAL - b.capacity
    assert 2 <= sum(map(again.holds, range(34))) <= 6, "the newest, in its floor"


@pytest.mark.parametrize("lose", [lambda folder: (folder / "TABLE-1").unlink(), shutil.rmtree])
def test_lost_records_change_no_server(
    two: tuple[Store, Store], tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    a, b = two
    rounds(a, two, 30, 2)
    before = a.capacity, b.capacity
    lose(tmp_path / "budget")
    tick(b, a)
    assert (a.capacity, b.capacity) == before
    assert rounds(b, two, 30, 3) >= 0.9


class Neighbour:
    """Another server's records, which say what the test sets."""

    def __init__(self, folder: Path, name: str, num_regions: int) -> None:
        self.shard = folder / name
        self.shard.mkdir(parents=True, exist_ok=True)
        self.records = BudgetRecords(
            folder / "budget", self.shard, total_bytes=TOTAL, floor_bytes=FLOOR
        )
        assert self.records.join()
        with self.records.table() as table:
            mine = table.records[self.records.name]
            mine.cap_bytes = mine.due_bytes = mine.held_bytes = num_regions * REGION
            mine.coldest_s = 1e6

    def give(self, least: int = 0) -> None:
        """Come down by a region, as far as it was asked to."""
        with self.records.table() as table:
            mine = table.records[self.records.name]
            lower = max(mine.cap_bytes - REGION, mine.due_bytes, least * REGION)
            mine.cap_bytes = min(mine.cap_bytes, lower)


def opened_at(folder: Path, least: int) -> int:
    """With how many regions a store opens, whose neighbour gives one whenever it looks."""
    now = 0.0
    neighbour = Neighbour(folder, "a", 37)

    def clock() -> float:
        nonlocal now
        neighbour.give(least)
        now += 3.0
        return now

    try:
        budget = MachineBudget(
            folder / "budget",
            folder / "b",
            total_bytes=TOTAL,
            floor_bytes=FLOOR,
            region_bytes=REGION,
            clock=clock,
        )
    finally:
        neighbour.records.leave()
    budget.leave()
    return budget.capacity_bytes // REGION


@pytest.mark.parametrize("neighbour_keeps", [20, 21])
def test_pins_open_with_all_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neighbour_keeps: int
) -> None:
    """They may take all of the nine files, which is half of what a store needs for that."""
    monkeypatch.setattr("sglang_tiered.integration.storage.machine_budget.TICK_S", 0.001)
    (tmp_path / "b").mkdir()
    for sequence in range(9):
        (tmp_path / "b" / region_name(sequence)).touch()
        os.truncate(tmp_path / "b" / region_name(sequence), REGION)
    (tmp_path / "b" / ("PIN-" + "a" * 32)).write_bytes(b"keeps who knows what")
    if neighbour_keeps == 20:
        assert opened_at(tmp_path, neighbour_keeps) >= 20
    else:
        for _ in range(2):  # refused, it is not opened at what it has then
            with pytest.raises(ConfigError):
                opened_at(tmp_path, neighbour_keeps)


def test_pins_of_before_hold_at_the_first_start(tmp_path: Path, open_store: OpenStore) -> None:
    """They were accepted beside a capacity that nobody knows any more."""
    alone = {"namespace": NAMESPACE, "region_bytes": REGION, "num_threads": 2}
    runs = [make_run(number, [PAGE] * PER_REGION) for number in range(22)]
    keys = [key for run in runs[:10] for key in run.keys]
    engine = RegionEngine(tmp_path / "b", capacity_bytes=TOTAL, **alone)
    for run in runs[:12]:
        finished(engine.submit_store(run))
    made = engine.pin("mine", keys)
    assert not isinstance(made, PinRefusal) and is_true(made, TIMEOUT_S)
    engine.close()
    neighbour = Neighbour(tmp_path, "a", 14)
    b = open_store("b")
    for run in runs[12:]:
        finished(b.engine.submit_store(run))
    assert b.engine.lookup(keys).num_hits == len(keys)
    neighbour.records.leave()


def config(folder: Path, **changes: object) -> TieredConfig:
    nvme = {
        "directory": str(folder / "kv"),
        "capacity_bytes": 64 << 20,
        "region_bytes": 4 << 20,
        "budget_directory": str(folder / "budget"),
        "floor_bytes": 8 << 20,
    }
    return TieredConfig(mode=TierMode.NVME, nvme=NvmeConfig(**(nvme | changes)))  # type: ignore[arg-type]


def test_terms_are_refused_before_a_model_loads(tmp_path: Path) -> None:
    check_budget(config(tmp_path))
    inside = config(tmp_path, budget_directory=str(tmp_path / "kv" / "budget"))
    with pytest.raises(ConfigError, match="is in its --tier-dir"):
        check_budget(inside)
    a = BudgetRecords(
        tmp_path / "budget", tmp_path / "a", total_bytes=64 << 20, floor_bytes=40 << 20
    )
    (tmp_path / "a").mkdir()
    assert a.join()
    check_budget(config(tmp_path))
    with pytest.raises(ConfigError, match="does not fit beside"):
        check_budget(config(tmp_path, floor_bytes=32 << 20))
    with pytest.raises(ConfigError, match="another total"):
        check_budget(config(tmp_path, capacity_bytes=60 << 20))
    a.leave()
