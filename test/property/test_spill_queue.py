"""Whatever happens to it, the spill queue loses no node, counts none twice and keeps its bounds."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kit.books import check_spill_queue
from sglang_tiered.policy import spill
from sglang_tiered.policy.spill import NodeStore, SpillQueue

HOST = 1000
MAX_WAITING = 12


def store(node: int, num_tokens: int) -> NodeStore[int]:
    return NodeStore(node, 0, num_tokens)


class SpillMachine(RuleBasedStateMachine):
    """A disk that finishes stores in order, when the rules say so."""

    @initialize()
    def start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(spill, "MAX_WAITING", MAX_WAITING)
        self.now = 0.0
        self.queue = SpillQueue[int](HOST, lambda: self.now)
        self.sizes: dict[int, int] = {}
        self.flights: deque[tuple[int, int]] = deque()
        self.outcomes: dict[int, str] = {}  # of every node that left, once
        self.number = 0

    def teardown(self) -> None:
        self.patch.undo()

    def leave(self, node: int, outcome: str) -> None:
        assert node in self.sizes and node not in self.outcomes
        self.outcomes[node] = outcome

    def waiting(self) -> set[int]:
        return self.sizes.keys() - self.outcomes.keys()

    @rule(size=st.integers(1, 400), returned=st.booleans())
    def add(self, size: int, returned: bool) -> None:
        self.number += 1
        self.sizes[self.number] = size
        evicted = self.queue.add_node(store(self.number, size), returned=returned)
        if evicted is not None:
            self.leave(evicted, "evicted")

    @rule(which=st.integers(0, 30), returned=st.booleans())
    def use_again(self, which: int, returned: bool) -> None:
        for node in sorted(self.waiting())[which : which + 1]:
            if returned:
                again = store(node, self.sizes[node])
                assert self.queue.add_node(again, returned=True) is None
            else:
                self.queue.promote_node(node)

    @rule(which=st.integers(0, 30))
    def discard(self, which: int) -> None:
        for node in sorted(self.waiting())[which : which + 1]:
            assert self.queue.discard_node(node)
            self.leave(node, "discarded")

    @rule(loads_wait=st.booleans())
    def take(self, loads_wait: bool) -> None:
        before = self.queue.flight_tokens
        taken = self.queue.take_next_node(loads_wait=loads_wait)
        if taken is None:
            # Nobody starves: with nothing in flight and no loads, whoever waits is taken.
            assert self.flights or loads_wait or not self.waiting()
            return
        node, size = taken.node, taken.num_tokens
        self.leave(node, "taken")
        assert size == self.sizes[node]
        num_flights = len(self.flights)
        assert num_flights < spill.MIN_FLIGHTS or before + size <= self.queue.limit_tokens
        self.flights.append((node, size))
        self.queue.note_flight(node, taken)

    @precondition(lambda self: self.flights)
    @rule(waited_s=st.floats(0, 3))
    def finish(self, waited_s: float) -> None:
        node, _ = self.flights.popleft()
        ended = self.queue.end_flight(node)
        assert ended is not None and ended.node == node
        assert self.queue.end_flight(node) is None
        self.queue.adapt_limit(waited_s)

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def held_nodes_get_their_turn(self) -> None:
        if self.waiting() and not self.flights:
            self.now += spill.MAX_HOLD_S + 1e-6  # the sum of floats may fall short of it
            self.take(loads_wait=True)
            assert self.flights

    @rule()
    def clear(self) -> None:
        self.queue.clear()
        for node in self.waiting():
            self.leave(node, "cleared")
        self.flights.clear()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "queue"):
            return
        check_spill_queue(self.queue)
        waiting = self.waiting()
        assert len(self.queue) == len(waiting) <= MAX_WAITING
        assert all(node in self.queue for node in waiting)
        assert self.queue.waiting_tokens == sum(self.sizes[node] for node in waiting)
        assert self.queue.flight_tokens == sum(size for _, size in self.flights)


TestSpillQueue = SpillMachine.TestCase
TestSpillQueue.settings = settings(max_examples=150, stateful_step_count=40)
