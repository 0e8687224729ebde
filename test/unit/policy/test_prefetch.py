"""The prefetch window."""

from __future__ import annotations

import pytest

from sglang_tiered.policy.prefetch import MAX_IGNORED_ASKS, MAX_IGNORED_TURNS, PrefetchWindow


def test_loads_beyond_the_window_are_postponed_and_retried() -> None:
    window: PrefetchWindow[str] = PrefetchWindow(1000)
    assert window.has_room(600, num_taken=400)
    assert not window.has_room(601, num_taken=400)
    window.put_off_load("a", 600)
    assert window.is_put_off("a")
    assert not window.has_turn("a", num_taken=401)
    assert window.has_turn("a", num_taken=400)
    window.withdraw_load("a")
    window.withdraw_load("a")
    assert not window.is_put_off("a")


def test_prompt_larger_than_the_window_still_loads() -> None:
    window: PrefetchWindow[str] = PrefetchWindow(1000)
    assert window.has_room(5000, num_taken=0)
    assert not window.has_room(5000, num_taken=1)


def test_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        PrefetchWindow(0)


def test_flush_forgets_waiting_requests() -> None:
    window: PrefetchWindow[str] = PrefetchWindow(10)
    window.put_off_load("a", 600)
    window.clear()
    assert window.num_put_off == 0


def test_request_whose_attempts_ended_does_not_wait_forever() -> None:
    window: PrefetchWindow[str] = PrefetchWindow(10)
    window.put_off_load("a", 600)
    assert all(window.ask_for_attempt("a") for _ in range(MAX_IGNORED_ASKS))
    window.put_off_load("a", 600)  # attempted again, still no room
    assert all(window.ask_for_attempt("a") for _ in range(MAX_IGNORED_ASKS))
    assert not window.ask_for_attempt("a")
    assert not window.is_put_off("a")


def test_request_without_a_load_waits_for_none() -> None:
    window: PrefetchWindow[str] = PrefetchWindow(1000)
    assert window.has_room(0, num_taken=5000)
    window.put_off_load("cold", 0)
    assert window.has_turn("cold", num_taken=5000)


def test_no_small_load_overtakes_a_large_one() -> None:
    """Or the large one would find no room for as long as small ones come."""
    window: PrefetchWindow[str] = PrefetchWindow(1000)
    window.put_off_load("large", 900)
    window.put_off_load("small", 100)
    assert not window.has_room_for_next(100, num_taken=200)
    assert window.has_room_for_next(0, num_taken=200)  # it loads nothing
    assert window.has_turn("small", num_taken=200)  # it could start now: nobody is before it
    assert window.turns(200) == []
    assert window.turns(100) == ["large"]
    assert window.turns(0) == ["large", "small"]


def test_load_that_is_never_attempted_blocks_nobody() -> None:
    """Its request waits for another server, or was attempted as often as it may be."""
    window: PrefetchWindow[str] = PrefetchWindow(1000)
    window.put_off_load("stuck", 900)
    window.put_off_load("next", 200)
    assert [window.turns(0) for _ in range(MAX_IGNORED_TURNS)] == [["stuck"]] * MAX_IGNORED_TURNS
    assert window.turns(0) == ["next"]
    window.withdraw_load("next")
    assert window.has_room_for_next(1000, num_taken=0)
    assert window.has_turn("stuck", num_taken=100)  # once it is asked about
    window.put_off_load("stuck", 900)  # it was attempted after all
    assert not window.has_room_for_next(100, num_taken=0)
    assert window.turns(0) == ["stuck"]
    window.withdraw_load("stuck")
    assert window.has_room_for_next(1000, num_taken=0)


def test_turns_follow_the_ranks() -> None:
    window: PrefetchWindow[str] = PrefetchWindow(1000)
    window.put_off_load("low", 100, (1, 0))
    window.put_off_load("late", 100, (-1, 2))
    window.put_off_load("early", 100, (-1, 1))
    assert window.turns(0) == ["early", "late", "low"]
    window.put_off_load("early", 100, (-1, 1))  # attempted, and put off again
    assert window.turns(0) == ["early", "late", "low"]
