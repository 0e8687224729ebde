"""A request's wait is what is ahead of it, at the speed at which the queue really moves; the busy
share is what a ruler over the batches measures."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_tiered.policy.queue_wait import (
    HALF_LIFE,
    MAX_RANKS,
    WINDOW_S,
    PrefillWork,
    QueuePlace,
    QueueWait,
)


@pytest.mark.parametrize("slowness", [0.25, 8.0])
def test_queue_that_moves_at_another_speed_is_noticed(slowness: float) -> None:
    """Batches hold several requests; full memory or running decodes hold all of them up."""
    queue = QueueWait()
    now = 0.0
    for _ in range(8 * HALF_LIFE):
        first = queue.arrives(None, 0.1, now, is_busy=True)
        behind = queue.arrives(None, 0.1, now, is_busy=True)
        queue.admitted(first, now)
        now += 0.1 * slowness
        queue.admitted(behind, now)
    queue.arrives(None, 0.1, now, is_busy=True)
    assert queue.seconds(is_busy=True) == pytest.approx(0.1 * slowness, rel=0.1)


def test_running_batch_delays_even_the_first() -> None:
    """What an idle server did says nothing of a busy one, nor does a wait for a load."""
    queue = QueueWait()
    for number in range(64):
        busy, loads = number % 4 == 0, number % 4 == 1
        place = queue.arrives(None, 0.1, float(number), is_busy=busy or loads)
        place.counts = not loads
        queue.admitted(place, number + (0.5 if busy else 60.0 if loads else 1e-4))
    assert queue.seconds(is_busy=True) == pytest.approx(0.5)
    assert queue.seconds(is_busy=False) == pytest.approx(0.0, abs=1e-3)


def test_a_request_adds_what_those_before_it_did() -> None:
    queue = QueueWait()
    assert queue.service_s == 0.0
    for number in range(8 * HALF_LIFE):
        place = queue.arrives(None, 0.1 if number % 2 else 0.3, 0.0, is_busy=False)
        aborted = queue.arrives(None, 9.0, 0.0, is_busy=False)
        queue.admitted(place, 0.0)
        queue.leaves(aborted)
        assert 0.1 <= queue.service_s <= 0.3
    assert queue.service_s == pytest.approx(0.2, rel=0.05)


def test_higher_priority_waits_for_its_equals_alone() -> None:
    queue = QueueWait()
    low = queue.arrives(None, 5.0, 0.0, is_busy=True, rank=1)
    high = queue.arrives(None, 0.1, 0.0, is_busy=True, rank=-1)
    middle = queue.arrives(None, 0.2, 0.0, is_busy=True)
    assert queue.seconds(is_busy=False, rank=-1) == pytest.approx(0.1)
    assert queue.seconds(high, is_busy=False) == 0.0
    assert queue.seconds(low, is_busy=False) == pytest.approx(0.3)
    assert high.order < middle.order < low.order


def test_arrival_costs_no_more_beside_many_priorities() -> None:
    """A client names them, and each plan looked at all that wait."""
    queue = QueueWait()
    places = [
        queue.arrives(None, 0.1, 0.0, is_busy=True, rank=(7 * number) % 5003)
        for number in range(5000)
    ]
    assert len(queue._ranks) <= MAX_RANKS and len(queue) == 5000
    assert len({place.order for place in places}) == 5000, "their turns are by their own"
    first, last = min(places, key=lambda each: each.order), max(places, key=lambda each: each.order)
    assert queue.seconds(first, is_busy=False) <= queue.seconds(last, is_busy=False)
    for place in places[1:]:
        queue.leaves(place)
    assert list(queue._ranks) == [places[0].equals.rank], "of those that nobody has any more"
    queue.leaves(places[0])
    assert not queue._ranks and len(queue) == 0


@example(  # what rounding leaves is no negative wait, which a router would refuse
    events=[("arrives", n, own_s) for n, own_s in enumerate((0.3, 0.1, 0.3))]
    + [("arrives", n, 0.0) for n in range(3)],
    has_ranks=False,
)
@example(events=[("arrives", 0, 0.3), ("arrives", 1, 0.1), ("arrives", 0, 0.1)], has_ranks=False)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["arrives", "admitted", "drop"]),
            st.integers(0, 7),
            st.sampled_from([0.0, 0.1, 0.3]),
        ),
        max_size=60,
    ),
    st.booleans(),
)
def test_books_of_the_queue_balance(events: list[tuple[str, int, float]], has_ranks: bool) -> None:
    queue = QueueWait()
    places: dict[int, QueuePlace] = {}
    own: dict[int, float] = {}
    for now, (event, request, own_s) in enumerate(events):
        if event == "arrives":
            rank = request % 3 if has_ranks else 0
            place = places.get(request)
            places[request] = queue.arrives(place, own_s, now, is_busy=now % 2 > 0, rank=rank)
            own[request] = own_s
        elif request in places and event == "admitted":
            queue.admitted(places.pop(request), float(now))
        elif request in places:
            queue.leaves(places.pop(request))
        assert len(queue) == len(places)
        assert all(place.own_s == own[each] for each, place in places.items())
        bound_s = queue.longest_s(is_busy=True)
        assert queue.seconds(is_busy=True, rank=9) == pytest.approx(bound_s)
        waits_s = [queue.seconds(place, is_busy=True) for place in places.values()]
        assert all(0 <= wait_s <= bound_s + 1e-9 for wait_s in waits_s)
    for place in places.values():
        queue.leaves(place)
    assert queue.longest_s(is_busy=False) == 0.0


# ---- What runs ----


steps = st.lists(
    st.tuples(st.floats(0, 4), st.floats(0, 25), st.integers(1, 3)), min_size=1, max_size=12
)


@given(st.integers(0, 10**6), steps, st.floats(0, 30))
def test_busy_share_equals_the_measured_overlap(
    start: int, pauses: list[tuple[float, float, int]], rest_s: float
) -> None:
    """Of the batch under way too."""
    work, now = PrefillWork(), float(start)
    batches: list[tuple[float, float]] = []

    def measured(at: float) -> Any:
        first = int(at) - WINDOW_S + 1  # of the seconds in the window
        overlaps_s = (max(0.0, min(end, at) - max(begun, first)) for begun, end in batches)
        return pytest.approx(min(1.0, sum(overlaps_s) / max(at - first, 1e-9)), abs=1e-6)

    for pause_s, takes_s, num_at_once in pauses:
        now += pause_s
        for _ in range(num_at_once):
            work.launched(takes_s, now)
        for _ in range(num_at_once):
            batches.append((now, now + takes_s))
            within = now + takes_s / 3
            assert work.busy_share(within) == measured(within)
            now += takes_s
            work.ended(now)
    assert work.busy_share(now + rest_s) == measured(now + rest_s)
    assert not work.is_running


def test_what_is_left_follows_launches_and_ends() -> None:
    work = PrefillWork()
    assert work.left_s(5.0) == 0.0
    work.launched(2.0, 5.0)
    work.launched(3.0, 5.5)
    assert work.left_s(6.0) == 4.0
    assert work.left_s(9.0) == 3.0, "a late batch took the next one's time"
    work.ended(9.0)
    assert work.left_s(10.0) == 2.0
    work.ended(10.0)
    assert work.left_s(10.0) == 0.0
    work.ended(11.0)  # of a batch that was not noted
    assert not work.is_running
