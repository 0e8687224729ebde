"""The records of servers that share NVMe: damage, loss, and other terms."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_tiered.checksummed import seal
from sglang_tiered.errors import ConfigError, StoreError, StoreLockedError
from sglang_tiered.storage import machine_budget
from sglang_tiered.storage.machine_budget import (
    BudgetRecords,
    StoreRecord,
    closed_bytes,
    trim_closed,
)
from sglang_tiered.storage.region.directory import DirectoryLock
from sglang_tiered.storage.region.format import region_name

TOTAL, FLOOR = 1000, 100


def member(folder: Path, name: str, *, total: int = TOTAL, floor: int = FLOOR) -> BudgetRecords:
    return BudgetRecords(folder / "budget", folder / name, total_bytes=total, floor_bytes=floor)


def joined(folder: Path, name: str, **terms: int) -> BudgetRecords:
    one = member(folder, name, **terms)
    (folder / name).mkdir(exist_ok=True)
    assert one.join()
    return one


def record_of(one: BudgetRecords, of: BudgetRecords) -> StoreRecord:
    with one.table() as table:
        return table.records[of.name]


def set_cap(one: BudgetRecords, nbytes: int) -> None:
    with one.table() as table:
        table.records[one.name].cap_bytes = table.records[one.name].due_bytes = nbytes


def regions(shard: Path, number: int, nbytes: int) -> None:
    for sequence in range(number):
        (shard / region_name(sequence)).write_bytes(bytes(nbytes))


@pytest.fixture
def closed(tmp_path: Path) -> BudgetRecords:
    """A closed store that has 700 of the total, and takes 450; nobody looked since."""
    one = joined(tmp_path, "a")
    set_cap(one, 700)
    regions(tmp_path / "a", 3, 150)
    one.leave()
    return one


def test_one_is_live_until_it_lets_go(tmp_path: Path) -> None:
    a, b = joined(tmp_path, "a"), joined(tmp_path, "b")
    set_cap(a, 700)
    with pytest.raises(StoreLockedError):
        member(tmp_path, "a").join()
    assert record_of(b, a).is_live and record_of(b, a).cap_bytes == 700


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_removed_file_revives_no_dead(
    tmp_path: Path, closed: BudgetRecords, is_removed: bool
) -> None:
    b = member(tmp_path, "b")
    if is_removed:
        (tmp_path / "budget" / f"SERVER-{closed.name}").unlink()
    found = record_of(b, closed)
    assert (found.is_live, found.cap_bytes) == (False, 450), "what it takes on the disk"
    again = joined(tmp_path, "a")
    assert record_of(b, again).cap_bytes == 450


def test_terms_of_the_living_count(tmp_path: Path) -> None:
    """And the floor of a closed one, until its shard is gone."""
    (tmp_path / "apart").mkdir()
    a = joined(tmp_path, "apart/a", floor=900)
    with pytest.raises(ConfigError, match="another total than the 1000 bytes"):
        member(tmp_path, "c", total=2000).join()
    a.leave()
    with pytest.raises(ConfigError, match="--tier-nvme-floor 200 does not fit"):
        member(tmp_path, "c", floor=200).join()
    (tmp_path / "apart" / "a").rmdir()
    joined(tmp_path, "c", floor=200).leave()
    joined(tmp_path, "b", total=2000)


def damage(table: Path) -> None:
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)


@pytest.mark.parametrize(
    "harm",
    [
        damage,
        lambda table: table.write_bytes(b""),
        lambda table: table.write_bytes(seal(["another", "kind"])),
    ],
)
def test_a_lost_table_frees_no_floor(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    a, b, dead = joined(tmp_path, "a"), joined(tmp_path, "b"), joined(tmp_path, "d")
    set_cap(a, 600)
    regions(tmp_path / "d", 2, 120)
    dead.leave()
    harm(tmp_path / "budget" / "TABLE-1")
    with b.table() as table:
        assert not table.is_whole, "nobody may take more"
        assert table.records[dead.name].cap_bytes == 240
        b.enter(table, 100)
    assert not member(tmp_path, "c").join(), "nor come in"
    with a.table() as table:
        a.enter(table, 600)
        assert table.is_whole
    joined(tmp_path, "c")


def test_one_that_comes_back_too_large_is_due(tmp_path: Path) -> None:
    a, b = joined(tmp_path, "a"), joined(tmp_path, "b")
    set_cap(b, 700)
    with a.table() as table:
        del table.records[a.name]
        assert a.enter(table, 600).due_bytes == 300


def test_a_removed_file_of_one_kills_nobody(tmp_path: Path) -> None:
    a, b = joined(tmp_path, "a"), joined(tmp_path, "b")
    set_cap(a, 700)
    (tmp_path / "budget" / f"SERVER-{a.name}").unlink()
    with DirectoryLock(tmp_path / "a"):  # as a server that has its store open
        assert record_of(b, a).cap_bytes == 700 and record_of(b, a).is_live
        with a.table():
            a.hold()
    a.leave()
    assert not record_of(b, a).is_live, "its file is there again"


def test_what_lies_beside_is_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "budget"
    place.mkdir()
    (place / "notes.txt").write_text("mine")
    (place / "SERVER-x").mkdir()
    (place / ("SERVER-" + "0" * 32)).write_bytes(b"torn")
    (place / ("SERVER-" + "1" * 32)).symlink_to("/etc/hostname")
    joined(tmp_path, "a")
    assert (place / "notes.txt").read_text() == "mine"


def test_another_version_and_everybodys_directory_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "budget"
    place.mkdir()
    (tmp_path / "a").mkdir()
    (place / "TABLE-2").write_bytes(b"of the future")
    with pytest.raises(ConfigError, match="TABLE-2, of another version"):
        member(tmp_path, "a").join()
    (place / "TABLE-2").unlink()
    place.chmod(0o777)
    with pytest.raises((ConfigError, StoreError), match="budget"):
        member(tmp_path, "a").join()
    assert not list(place.glob("SERVER-*"))


def test_a_closed_shard_gives_its_oldest(tmp_path: Path) -> None:
    regions(tmp_path, 6, 100)
    assert trim_closed(tmp_path, 350)
    left = [region_name(sequence) for sequence in (3, 4, 5)]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "LOCK") == left
    (tmp_path / ("PIN-" + "a" * 32)).write_bytes(b"keeps who knows what")
    assert not trim_closed(tmp_path, 100)
    (tmp_path / ("PIN-" + "a" * 32)).unlink()
    with DirectoryLock(tmp_path):
        assert not trim_closed(tmp_path, 100), "a process has it open"
    assert closed_bytes(tmp_path) == 300


def test_what_pins_kept_is_asked_again(tmp_path: Path, closed: BudgetRecords) -> None:
    b = member(tmp_path, "b")
    pin = tmp_path / "a" / ("PIN-" + "a" * 32)
    pin.write_bytes(b"keeps who knows what")
    found = record_of(b, closed)
    assert found.keeps_bytes == found.cap_bytes >= 450
    pin.unlink()
    assert record_of(b, closed).keeps_bytes == 0


def test_a_shard_that_fails_stops_no_other(
    tmp_path: Path, closed: BudgetRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, listdir = member(tmp_path, "b"), os.listdir

    def failing(path: Path | int = -1) -> list[str]:
        if path == tmp_path / "a":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return listdir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", failing)
        found = record_of(b, closed)
        assert found.keeps_bytes == found.cap_bytes == 700, "it may take all that it had"
        joined(tmp_path, "c")
    assert record_of(b, closed).keeps_bytes == 0, "it can be read again"


def test_a_start_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own lock is nobody else's."""
    one = member(tmp_path, "a")
    (tmp_path / "a").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(machine_budget, "closed_bytes", lambda _: os.close(-1))
        with pytest.raises(StoreError, match="Bad file descriptor"):
            one.join()
    assert one.join()


def test_floors_of_its_own_other_ranks_refuse_nothing(tmp_path: Path) -> None:
    """They go with their shards: a server that comes again with more ranks takes their place."""
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
    joined(tmp_path, "other/tp0of1", floor=500)
    joined(tmp_path, "mine/tp0of1", floor=500).leave()
    joined(tmp_path, "mine/tp0of2", floor=250)
    with pytest.raises(ConfigError, match="--tier-nvme-floor 501 does not fit"):
        member(tmp_path, "mine/tp1of2", floor=501).join()


@pytest.mark.parametrize("field", ["name", "floor_bytes", "cap_bytes", "due_bytes", "held_bytes"])
def test_a_record_of_no_store_is_dropped(tmp_path: Path, field: str) -> None:
    """Or somebody's files would be trimmed, or negative numbers make room for others."""
    victim = tmp_path / "victim"
    victim.mkdir()
    regions(victim, 3, 150)
    name = hashlib.blake2b(os.fsencode(victim.resolve()), digest_size=16).hexdigest()
    numbers = {"floor_bytes": 0, "cap_bytes": 450, "due_bytes": 450, "held_bytes": 450}
    if field == "name":
        name = "0" * 32
    else:
        numbers[field] = -500
    record = StoreRecord(shard=str(victim), is_live=False, **numbers)
    b = joined(tmp_path, "b")
    (tmp_path / "budget" / f"SERVER-{name}").write_bytes(b"")
    (tmp_path / "budget" / "TABLE-1").write_bytes(seal((TOTAL, {name: record})))
    with b.table() as table:
        assert name not in table.records
