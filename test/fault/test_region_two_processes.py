"""Two processes on one directory: the second is told who has it, the first notices nothing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from simulation.child import Child, open_directory, run_keys
from simulation.ledger import Ledger

from sglang_tiered.errors import StoreLockedError

if TYPE_CHECKING:
    from pathlib import Path

NUM_RIVALS = 3


def opened(child: Child) -> Child:
    assert child.line() == "opening"
    assert child.line() == "open"
    return child


def served(child: Child, number: int) -> bool:
    child.tell(f"hold {number}")
    return child.line() == "served"


def listing(directory: Path) -> list[tuple[str, int, int]]:
    return sorted(
        (file.name, file.stat().st_ino, file.stat().st_size) for file in directory.iterdir()
    )


def test_the_second_process_is_told_the_holder(tmp_path: Path) -> None:
    with Child(tmp_path) as first:
        opened(first)
        assert served(first, 0)
        before = listing(tmp_path)
        for _ in range(3):
            with pytest.raises(StoreLockedError, match=rf"in use by process {first.pid};"):
                open_directory(tmp_path)
        with Child(tmp_path) as second:
            assert second.line() == "opening"
            assert re.search(rf"^locked .* in use by process {first.pid};", second.line())
        assert listing(tmp_path) == before, "a store that was refused touched the files"
        assert served(first, 0), "the page of the first is gone"
        assert served(first, 1), "the first stores no more"
        assert first.end() == 0
    engine = open_directory(tmp_path)
    ledger = Ledger(submitted={*run_keys(0), *run_keys(1)})
    ledger.check(engine, ledger.submitted)
    engine.close()


def test_a_kill_frees_the_lock_despite_children(tmp_path: Path) -> None:
    with Child(tmp_path) as first:
        opened(first)
        assert served(first, 0)
        first.tell("spawn")
        assert first.line() == "spawned"
        with pytest.raises(StoreLockedError):
            open_directory(tmp_path)
        first.strike()
        with Child(tmp_path) as second:
            opened(second)
            assert served(second, 0)
            assert second.end() == 0
