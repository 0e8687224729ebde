"""Records of requests: their states, and what they waited for, in histograms."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kit.clock import Clock
from sglang_tiered.integration.cache.loads import Loads, State


def test_wait_for_a_load_begins_with_the_turn() -> None:
    clock = Clock(100.0)
    loads: Loads[str] = Loads(clock)
    loads.arrives("r")
    loads.get("r").num_loaded = 64
    clock.now += 4.0  # behind others
    loads.held_up(loads.get("r"))
    clock.now += 0.5
    loads.held_up(loads.get("r"))
    loads.arrives("r")  # its load is attempted again
    clock.now += 0.5
    loads.admitted(loads.get("r"))
    stats = loads.wait_stats()
    assert (stats.requests.count, stats.requests.sum_s) == (1, 5.0)
    assert (stats.loads.count, stats.loads.sum_s) == (1, 1.0)


def test_load_that_kept_nobody_counts_as_none() -> None:
    clock = Clock()
    loads: Loads[str] = Loads(clock)
    for request in ("loads", "cold"):
        loads.arrives(request)
    loads.get("loads").num_loaded = 64
    loads.held_up(loads.get("cold"))  # until all ranks had agreed that nothing is loaded
    clock.now += 2.0
    for request in ("loads", "cold", "unknown"):
        loads.admitted(loads.get(request))
    stats = loads.wait_stats()
    assert (stats.requests.count, stats.requests.sum_s) == (2, 4.0)
    assert (stats.loads.count, stats.loads.sum_s) == (1, 0.0)


def test_aborted_request_leaves_no_wait() -> None:
    loads: Loads[str] = Loads(Clock())
    loads.arrives("aborted")
    loads.get("aborted").num_loaded = 64
    loads.drop("aborted")
    loads.admitted(loads.get("aborted"))
    assert loads.wait_stats().requests.count == loads.wait_stats().loads.count == 0


def test_nothing_is_remembered_of_an_unknown_request() -> None:
    loads: Loads[str] = Loads(Clock())
    loads.get("r").num_attempts = 2
    loads.held_up(loads.get("r"))
    loads.move("r", State.LOADING)
    loads.drop("r")
    assert not loads and not loads.in_state(*State) and loads.get("r").num_attempts == 0


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
