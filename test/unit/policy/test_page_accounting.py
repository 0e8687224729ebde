"""Every host page that leaves ends in one counter, the right one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered.policy.admission import EvictionOutcome, PageAccounting


def pages(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def left(accounting: PageAccounting) -> dict[EvictionOutcome, int]:
    return {outcome: count for outcome, count in accounting.left.items() if count}


def test_dropped_page_that_is_stored_later_leaves_clean() -> None:
    accounting = PageAccounting(8, 1)
    accounting.note_written(pages(0, 1))
    for outcome in (EvictionOutcome.LOST_FIRST_TOUCH, EvictionOutcome.CLEAN):
        assert accounting.num_dirty == 2
        accounting.note_stored(pages(0), [outcome])
    assert accounting.num_dirty == 1
    accounting.note_freed(pages(0, 1))
    assert left(accounting) == {EvictionOutcome.CLEAN: 1, EvictionOutcome.LOST_WAITING: 1}
    assert accounting.num_dirty == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["write", "load", "free", "flush", "store"]),
            st.sets(st.integers(0, 7), min_size=1),
            st.sampled_from(list(EvictionOutcome)),
        ),
        max_size=60,
    )
)
def test_what_entered_left_or_is_still_there(
    operations: list[tuple[str, set[int], EvictionOutcome]],
) -> None:
    accounting = PageAccounting(8, 1)
    held: set[int] = set()
    dirty: set[int] = set()
    num_entered = 0
    for operation, numbers, outcome in operations:
        if operation in ("write", "load"):
            fresh = numbers - held
            enter = accounting.note_written if operation == "write" else accounting.note_loaded
            enter(pages(*fresh))
            held |= fresh
            dirty |= fresh if operation == "write" else set()
            num_entered += len(fresh)
        elif operation == "flush":
            accounting.note_flushed()
            held.clear()
            dirty.clear()
        else:
            chosen = numbers & held
            if operation == "free":
                accounting.note_freed(pages(*chosen))
                held -= chosen
                dirty -= chosen
            else:
                accounting.note_stored(pages(*chosen), [outcome] * len(chosen))
                dirty = dirty - chosen if outcome is EvictionOutcome.CLEAN else dirty | chosen
        assert sum(accounting.left.values()) + len(held) == num_entered
        assert accounting.num_dirty == len(dirty)
