"""Every host page that leaves ends in one counter, the right one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tiered.policy.page_accounting import Fate, PageFates


def pages(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def left(fates: PageFates) -> dict[Fate, int]:
    return {fate: count for fate, count in fates.left.items() if count}


def test_page_is_dirty_until_it_is_stored() -> None:
    fates = PageFates(8)
    fates.written(pages(1, 2, 3))
    assert fates.num_dirty == 3
    fates.stored(pages(1, 2), [Fate.CLEAN, Fate.LOST_BUDGET])
    assert fates.num_dirty == 2
    fates.freed(pages(3, 1, 2))
    assert left(fates) == {Fate.CLEAN: 1, Fate.LOST_WAITING: 1, Fate.LOST_BUDGET: 1}
    assert fates.num_dirty == 0


def test_dropped_page_stored_later_leaves_clean() -> None:
    fates = PageFates(8)
    fates.written(pages(0))
    fates.stored(pages(0), [Fate.LOST_FIRST_TOUCH])
    fates.stored(pages(0), [Fate.CLEAN])
    fates.freed(pages(0))
    assert left(fates) == {Fate.CLEAN: 1}


def test_loaded_page_leaves_clean_and_frees_its_slot() -> None:
    fates = PageFates(8)
    fates.loaded(pages(5))
    assert fates.num_dirty == 0
    fates.freed(pages(5))
    fates.freed(pages(5))  # a page nobody told of
    assert left(fates) == {Fate.CLEAN: 1, Fate.LOST_UNOFFERED: 1}
    fates.check_integrity()


def test_store_of_an_unknown_page_keeps_the_count() -> None:
    fates = PageFates(8)
    fates.stored(pages(1, 2), [Fate.CLEAN, Fate.LOST_FAILED])
    assert fates.num_dirty == 0
    fates.freed(pages(1, 2))
    assert left(fates) == {Fate.CLEAN: 1, Fate.LOST_UNOFFERED: 1}


def test_flush_counts_dirty_pages() -> None:
    fates = PageFates(8)
    fates.written(pages(0, 1, 2))
    fates.stored(pages(1), [Fate.CLEAN])
    fates.flushed()
    fates.flushed()
    assert left(fates) == {Fate.CLEAN: 1, Fate.LOST_FLUSHED: 2}
    assert fates.num_dirty == 0
    fates.written(pages(0))
    assert fates.num_dirty == 1


def test_kv_without_a_page_is_counted_apart() -> None:
    fates = PageFates(1)
    fates.never_written(7)
    assert left(fates) == {Fate.LOST_HOST_SHORT: 7} and fates.num_dirty == 0


@pytest.mark.parametrize("fate", [fate for fate in Fate if fate is not Fate.CLEAN])
def test_every_reason_is_counted_apart(fate: Fate) -> None:
    fates = PageFates(4)
    fates.written(pages(2))
    fates.stored(pages(2), [fate])
    fates.freed(pages(2))
    assert left(fates) == {fate: 1}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["write", "load", "free", "flush", "store"]),
            st.sets(st.integers(0, 7), min_size=1),
            st.sampled_from(list(Fate)),
        ),
        max_size=60,
    )
)
def test_every_entered_page_left_or_remains(
    operations: list[tuple[str, set[int], Fate]],
) -> None:
    fates = PageFates(8)
    held: set[int] = set()
    num_entered = 0
    for operation, numbers, fate in operations:
        if operation in ("write", "load"):
            fresh = numbers - held
            enter = fates.written if operation == "write" else fates.loaded
            enter(pages(*fresh))
            held |= fresh
            num_entered += len(fresh)
        elif operation == "flush":
            fates.flushed()
            held.clear()
        else:
            chosen = numbers & held
            if operation == "free":
                fates.freed(pages(*chosen))
                held -= chosen
            else:
                fates.stored(pages(*chosen), [fate] * len(chosen))
        fates.check_integrity()
        assert sum(fates.left.values()) + len(held) == num_entered
        assert 0 <= fates.num_dirty <= len(held)
