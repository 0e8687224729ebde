"""Names change under a running store: its directory, its lock, its files; or it is copied."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from simulation.engine import REGION, running
from simulation.ledger import TIMEOUT_S, Ledger, fill, held, keys

from sglang_tiered.storage.base import Erasure, Health, Reason
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region.format import ERASED_NAME, LOCK_NAME, region_name

CAPACITY = 4 * REGION
FIRST, SECOND = keys(range(6)), keys(range(100, 106))


def test_a_moved_store_meets_no_other(tmp_path: Path) -> None:
    """Another server finds the old name free. Neither reads, purges or removes what is the
    other's."""
    here, there = tmp_path / "here", tmp_path / "there"
    with running(here, None, capacity_bytes=CAPACITY) as moved:
        Ledger().store(moved, FIRST)
        here.rename(there)
        with running(here, None, capacity_bytes=CAPACITY) as other:
            Ledger().store(other, FIRST + SECOND)
            assert is_true(other.erase(Erasure.of(SECOND)), TIMEOUT_S)
            said = (here / ERASED_NAME).read_bytes()
            assert is_true(moved.erase(Erasure()), TIMEOUT_S)
            fill(moved, 1000, 40)
            assert moved.health is Health.RUNNING
            moved.check_integrity()
            assert (here / ERASED_NAME).read_bytes() == said
            assert (there / ERASED_NAME).exists()
            assert Ledger().load(other, FIRST) == [Reason.OK] * 6
            other.check_integrity()
    with running(there, None, capacity_bytes=CAPACITY) as again:
        assert not any(again.contains(FIRST))
        assert any(again.contains(keys(range(1000, 1120))))


@pytest.mark.parametrize("what", ["directory", "lock"])
def test_a_lost_lock_ends_in_misses(tmp_path: Path, what: str) -> None:
    """Another server could have the files by now: what it purged must not be served."""
    home = tmp_path / "store"
    with running(home, None, capacity_bytes=CAPACITY) as engine:
        Ledger().store(engine, FIRST)
        if what == "directory":
            shutil.rmtree(home)
        else:
            (home / LOCK_NAME).unlink()
        with running(home, None, capacity_bytes=CAPACITY) as other:
            Ledger().store(other, SECOND)
            assert is_true(other.erase(Erasure.of(FIRST)), TIMEOUT_S)
            said = (home / ERASED_NAME).read_bytes()
            assert Reason.OK not in Ledger().load(engine, FIRST)
            assert engine.health is Health.MISS_ONLY
            assert "was removed" in engine.stats().health_reason
            assert set(Ledger().store(engine, keys([7]))) == {Reason.REJECTED}
            assert not is_true(engine.erase(Erasure()), TIMEOUT_S)
            pinned = engine.pin("p", FIRST)
            assert not is_true(pinned, TIMEOUT_S)  # type: ignore[arg-type]
            assert (home / ERASED_NAME).read_bytes() == said
            assert Ledger().load(other, SECOND) == [Reason.OK] * 6
            other.check_integrity()
    with running(home, None, capacity_bytes=CAPACITY) as again:
        assert Ledger().load(again, SECOND) == [Reason.OK] * 6


def test_reclaim_removes_no_file_of_others(tmp_path: Path) -> None:
    """Something else has been put under the name of a region that goes."""
    home = tmp_path / "store"
    with running(home, None, capacity_bytes=CAPACITY) as engine:
        Ledger().store(engine, FIRST)
        first = home / region_name(0)
        first.rename(tmp_path / "moved")
        first.write_bytes(b"precious")
        fill(engine, 1000, 40)
        assert not any(engine.contains(FIRST))
        assert first.read_bytes() == b"precious"
        first.unlink()


def test_copy_of_a_busy_store_has_durable_pages(tmp_path: Path) -> None:
    home, copies = tmp_path / "store", [tmp_path / f"copy{number}" for number in range(4)]
    before, meanwhile = keys(range(24)), keys(range(100, 160))
    with running(home, None) as engine:
        Ledger().store(engine, before)
        assert engine.flush(TIMEOUT_S)
        storing = threading.Thread(
            target=lambda: [Ledger().store(engine, [each]) for each in meanwhile]
        )
        storing.start()
        for copy in copies:
            shutil.copytree(home, copy)
        storing.join(TIMEOUT_S)
        assert not storing.is_alive()
    for copy in copies:
        with running(copy, None) as engine:
            assert held(engine, before) == len(before)
            held(engine, meanwhile)  # some of them, and none of them wrong
