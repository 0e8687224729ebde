"""``kill -9`` of a server that shares a budget, at each step of what it does with the records."""

from __future__ import annotations

from pathlib import Path

import pytest
from budget_child import FLOOR, REGION, STEPS, TOTAL, BudgetChild

from sglang_tiered.storage.machine_budget import closed_bytes


def ticked(child: BudgetChild, order: str = "tick") -> int:
    child.tell(order)
    return child.capacity()


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("step", [step for step in STEPS if step not in ("shrinking", "trimming")])
def test_a_death_while_it_takes(tmp_path: Path, step: str, count: int) -> None:
    with BudgetChild(tmp_path, "b") as other:
        assert other.capacity() == FLOOR
        with BudgetChild(tmp_path, "a", step, count) as dying:
            try:
                for _ in range(40):
                    ticked(dying, "write")
                    ticked(other)
            except (AssertionError, BrokenPipeError):
                pass
            else:
                raise AssertionError(f"it never came to {step}")
        others_without_harm(tmp_path, other)


def others_without_harm(folder: Path, other: BudgetChild) -> None:
    """The survivor has all but the floor of the dead, which starts again at what is left."""
    for _ in range(30):
        capacity = ticked(other, "write")
        assert closed_bytes(folder / "a") + closed_bytes(folder / "b") <= TOTAL
    assert capacity == TOTAL - FLOOR
    with BudgetChild(folder, "a") as again:
        assert again.capacity() >= FLOOR
        assert ticked(other, "write") == TOTAL - FLOOR
        ticked(again, "write")
        assert closed_bytes(folder / "a") + closed_bytes(folder / "b") <= TOTAL


def test_a_death_while_it_gives(tmp_path: Path) -> None:
    """Asked to come down, it dies with its capacity lowered and its record not."""
    with BudgetChild(tmp_path, "b") as other:
        other.capacity()
        with BudgetChild(tmp_path, "a", "shrinking") as dying:
            while dying_capacity(dying) < TOTAL - FLOOR:
                pass
            # Its pages become cold, while the other goes round and round in what it has.
            with pytest.raises((AssertionError, BrokenPipeError)):
                for _ in range(400):
                    ticked(other, "write")
                    ticked(dying)
        others_without_harm(tmp_path, other)


def dying_capacity(child: BudgetChild) -> int:
    return ticked(child, "write")


def test_a_death_while_it_trims_the_dead(tmp_path: Path) -> None:
    with BudgetChild(tmp_path, "a") as first:
        while dying_capacity(first) < TOTAL - 2 * FLOOR:
            pass
    before = closed_bytes(tmp_path / "a")
    assert before > FLOOR
    with (
        BudgetChild(tmp_path, "b", "trimming", 2) as second,
        pytest.raises((AssertionError, BrokenPipeError)),
    ):
        for _ in range(40):
            ticked(second, "write")
    assert FLOOR <= closed_bytes(tmp_path / "a") < before
    with BudgetChild(tmp_path, "c") as third:
        for _ in range(30):
            capacity = ticked(third, "write")
        assert capacity == TOTAL - 2 * FLOOR
    assert closed_bytes(tmp_path / "a") <= FLOOR + REGION
