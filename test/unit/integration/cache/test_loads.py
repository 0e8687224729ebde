"""Records of requests: their states, and what they waited for, in histograms."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kit.clock import Clock
from sglang_tiered.integration.cache.loads import (
    MAX_IGNORED_TURNS,
    MAX_TURNS,
    Loads,
    RequestLoad,
    State,
    Turns,
)
from sglang_tiered.policy.queue_wait import QueueWait


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["of", "arrives", "drop", "clear", "back", *State]), st.integers(0, 4)
        ),
        max_size=60,
    )
)
def test_each_request_is_in_its_state_alone(events: list[tuple[State | str, int]]) -> None:
    """In the order in which they came to it; a state's turns would else be lost or taken twice."""
    loads: Loads[int] = Loads(Clock())
    states: dict[int, State] = {}
    came: dict[int, bool] = {}  # in this order; whether it is timed
    for event, request in events:
        if isinstance(event, State):
            loads.move(request, event)
            if states.pop(request, None) is not None:
                states[request] = event
        elif event == "of":
            loads.of(request)
            states.setdefault(request, State.WAITING)
            came.setdefault(request, False)
        elif event == "arrives":
            loads.arrives(request)
            states.setdefault(request, State.WAITING)
            came[request] = True
        elif event == "drop":
            loads.drop(request)
            states.pop(request, None)
            came.pop(request, None)
        elif event == "clear":
            loads.clear()
            came = {each: True for each, is_timed in came.items() if is_timed}
            states = dict.fromkeys(came, State.WAITING)
        elif request in states:
            loads.keep_back(request)
            came[request] = False
        for state in State:
            expected = [each for each, is_in in states.items() if is_in is state]
            assert loads.in_state(state) == expected
            assert loads.num_in(state) == len(expected)
        assert len(loads) == len(states)


class Queue:
    """A window of 1,000 tokens, and requests whose loads are put off."""

    def __init__(self) -> None:
        self.turns, self.wait = Turns(1000), QueueWait()

    def put_off(self, name: str, num_tokens: int, rank: int = 0, **more: bool) -> RequestLoad:
        place = self.wait.arrives(None, 1.0, 0.0, is_busy=False, rank=rank)
        record = RequestLoad(name, place=place)
        self.turns.put_off(record, num_tokens, **more)
        return record


def test_load_that_is_never_attempted_blocks_nobody() -> None:
    """Its request waits for another server, or was attempted as often as it may be."""
    queue = Queue()
    turns = queue.turns
    stuck, following = queue.put_off("stuck", 900), queue.put_off("next", 200)
    assert not turns.has_room_for_next(100, 200) and turns.has_room_for_next(0, 200)
    assert turns.has_room(0, 5000), "one of nothing waits for none"
    assert [turns.take(0) for _ in range(MAX_IGNORED_TURNS)] == [["stuck"]] * MAX_IGNORED_TURNS
    assert turns.take(0) == ["next"]
    turns.withdraw(following)
    assert turns.has_room_for_next(1000, 0)
    turns.could_start(stuck)
    assert not turns.has_room_for_next(100, 0) and turns.take(100) == ["stuck"]
    turns.withdraw(stuck)
    assert turns.has_room_for_next(1000, 0) and turns.take(0) == []
    gave_way = queue.put_off("gave way", 900, rests=True)
    assert turns.take(0) == [] and not turns.wait_for_room
    turns.could_start(gave_way)
    assert turns.wait_for_room and turns.take(0) == ["gave way"]


def test_request_that_could_start_goes_first() -> None:
    queue = Queue()
    turns = queue.turns
    queue.put_off("far", 100)
    large, small = queue.put_off("large", 900), queue.put_off("small", 100)
    queue.put_off("urgent", 50, rank=-1)
    turns.could_start(small)
    turns.could_start(large)
    assert turns.first_ready() is large
    assert turns.take(200) == []  # "small" passes it no more than the others do
    turns.could_start(small)
    assert turns.take(750) == ["small", "urgent", "far"]
    assert turns.take(800, only_ready=True) == []


def test_nothing_stays_of_loads_that_left() -> None:
    """Or new ones would wait for their room for ever, and turns go to requests that are gone."""
    queue = Queue()
    turns = queue.turns
    stuck = queue.put_off("stuck", 900)
    for _ in range(MAX_IGNORED_TURNS):
        turns.take(0)
    turns.withdraw(stuck)
    aborted = queue.put_off("aborted", 100)
    assert turns.wait_for_room
    turns.could_start(aborted)
    turns.withdraw(aborted)
    assert turns.first_ready() is None and aborted.num_put_off is None
    turns.could_start(queue.put_off("flushed", 100))
    turns.clear()
    assert turns.first_ready() is None and turns.take(0) == [] and not turns.wait_for_room


def test_each_has_one_turn_in_its_order() -> None:
    queue = Queue()
    turns = queue.turns
    many = [queue.put_off(f"{number}", 1) for number in range(MAX_TURNS + 1)]
    for ready in ([], many[:1], many[::-1]):
        for record in ready:
            turns.could_start(record)
        assert turns.take(0) == [f"{number}" for number in range(MAX_TURNS)]
