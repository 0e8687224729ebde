"""The prefetch window."""

from __future__ import annotations

import pytest

from sglang_tiered.policy.prefetch import MAX_IGNORED_TURNS, PrefetchWindow

Window = PrefetchWindow[str]


@pytest.fixture
def window() -> Window:
    return PrefetchWindow(1000)


@pytest.mark.parametrize(
    ("num_tokens", "num_taken", "has_room"),
    [(600, 400, True), (601, 400, False), (5000, 0, True), (5000, 1, False), (0, 5000, True)],
)
def test_loads_beyond_the_window_have_no_room(
    window: Window, num_tokens: int, num_taken: int, has_room: bool
) -> None:
    """But for one that is larger than the window, and one of nothing."""
    assert window.has_room(num_tokens, num_taken=num_taken) is has_room


def test_postponed_loads_are_retried(window: Window) -> None:
    put_off = window.put_off_load("a", 600)
    assert window.turns(401) == []
    assert window.turns(400) == ["a"]
    window.withdraw_load(put_off)
    assert window.turns(0) == []
    window.put_off_load("cold", 0)
    assert window.turns(5000) == ["cold"]
    window.clear()
    put_off = window.put_off_load("gave way", 900, rests=True)
    assert window.turns(0) == [] and not window.waits_for_room
    window.could_start(put_off)
    assert window.waits_for_room and window.turns(0) == ["gave way"]
    window.clear()
    assert window.turns(0) == [] and not window.waits_for_room


def test_no_small_load_overtakes_a_large_one(window: Window) -> None:
    """Or the large one would find no room for as long as small ones come."""
    window.put_off_load("large", 900)
    window.put_off_load("small", 100)
    assert not window.has_room_for_next(100, num_taken=200)
    assert window.has_room_for_next(0, num_taken=200)  # it loads nothing
    assert window.turns(200) == []
    assert window.turns(100) == ["large"]
    assert window.turns(0) == ["large", "small"]


def test_load_that_is_never_attempted_blocks_nobody(window: Window) -> None:
    """Its request waits for another server, or was attempted as often as it may be."""
    stuck = window.put_off_load("stuck", 900)
    following = window.put_off_load("next", 200)
    assert [window.turns(0) for _ in range(MAX_IGNORED_TURNS)] == [["stuck"]] * MAX_IGNORED_TURNS
    assert window.turns(0) == ["next"]
    window.withdraw_load(following)
    assert window.has_room_for_next(1000, num_taken=0)
    window.could_start(stuck)
    assert window.turns(100) == ["stuck"]
    window.withdraw_load(stuck)
    stuck = window.put_off_load("stuck", 900)  # it was attempted after all
    assert not window.has_room_for_next(100, num_taken=0)
    assert window.turns(0) == ["stuck"]
    window.withdraw_load(stuck)
    assert window.has_room_for_next(1000, num_taken=0)


def test_request_that_could_start_goes_first(window: Window) -> None:
    window.put_off_load("far", 100, (0, 0))
    large = window.put_off_load("large", 900, (0, 1))
    small = window.put_off_load("small", 100, (0, 2))
    window.could_start(small)
    window.could_start(large)
    assert window.first_ready() is large
    assert window.turns(200) == []  # "small" passes it no more than "far" does
    window.could_start(small)
    assert window.turns(800) == ["small", "far"]
    assert window.turns(800, only_ready=True) == []


def test_turns_follow_the_ranks(window: Window) -> None:
    window.put_off_load("low", 100, (1, 0))
    window.put_off_load("late", 100, (-1, 2))
    early = window.put_off_load("early", 100, (-1, 1))
    assert window.turns(0) == ["early", "late", "low"]
    window.withdraw_load(early)
    window.put_off_load("early", 100, (-1, 1))  # attempted, and put off again
    assert window.turns(0) == ["early", "late", "low"]
