"""Records of requests: their states, and what they waited for, in histograms."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kit.clock import Clock
from sglang_tiered.integration.cache.loads import Loads, State


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
