"""Whatever happens to it, the spill queue loses no node, counts none twice, and keeps its order and
its bounds."""

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
        self.turns: tuple[list[int], list[int]] = [], []  # the second list goes first
        self.sizes: dict[int, int] = {}
        self.flights: deque[tuple[int, NodeStore[int]]] = deque()
        self.number = 0

    def teardown(self) -> None:
        self.patch.undo()

    def waiting(self) -> list[int]:
        return [*self.turns[0], *self.turns[1]]

    def leave(self, node: int) -> None:
        next(turn for turn in self.turns if node in turn).remove(node)

    @rule(size=st.integers(1, 400), returned=st.booleans())
    def add(self, size: int, returned: bool) -> None:
        self.number += 1
        self.sizes[self.number] = size
        least = self.waiting()[0] if len(self.waiting()) == MAX_WAITING else None
        assert self.queue.add_node(store(self.number, size), returned=returned) == least
        if least is not None:
            self.leave(least)
        self.turns[returned].append(self.number)

    @rule(which=st.integers(0, 30), size=st.integers(0, 400), returned=st.booleans())
    def use_again(self, which: int, size: int, returned: bool) -> None:
        """It keeps its place, or gets a better one, and its store is the new one, if any."""
        for node in self.waiting()[which : which + 1]:
            if size:
                self.sizes[node] = size
                assert self.queue.add_node(store(node, size), returned=returned) is None
            elif returned:
                self.queue.promote_node(node)
            if returned and node in self.turns[0]:
                self.leave(node)
                self.turns[1].append(node)
        self.queue.promote_node(-1)  # which does not wait

    @rule(which=st.integers(0, 30))
    def discard(self, which: int) -> None:
        for node in self.waiting()[which : which + 1]:
            assert self.queue.discard_node(node)
            self.leave(node)
            assert not self.queue.discard_node(node)

    @rule(loads_wait=st.booleans(), num_operations=st.integers(1, 2))
    def take(self, loads_wait: bool, num_operations: int = 1) -> None:
        before = self.queue.flight_tokens
        taken = self.queue.take_next_node(loads_wait=loads_wait)
        if taken is None:
            # Nobody starves: with nothing in flight and no loads, whoever waits is taken.
            assert self.flights or loads_wait or not self.waiting()
            return
        node, size = taken.node, taken.num_tokens
        assert (node, size) == ((self.turns[1] or self.turns[0])[0], self.sizes[node])
        self.leave(node)
        num_flights = len(self.flights)
        assert num_flights < spill.MIN_FLIGHTS or before + size <= self.queue.limit_tokens
        for _ in range(num_operations):
            self.number += 1
            self.flights.append((self.number, taken))
            self.queue.note_flight(self.number, taken)

    @precondition(lambda self: self.flights)
    @rule(waited_s=st.floats(0, 3))
    def finish(self, waited_s: float) -> None:
        operation, begun = self.flights.popleft()
        assert self.queue.end_flight(operation) is begun
        assert self.queue.end_flight(operation) is None
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
        for turn in self.turns:
            turn.clear()
        self.flights.clear()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "queue"):
            return
        check_spill_queue(self.queue)
        waiting, flights = self.waiting(), [one for _, one in self.flights]
        assert self.queue.waiting() == waiting and len(self.queue) == len(waiting) <= MAX_WAITING
        assert self.queue.waiting_tokens == sum(self.sizes[node] for node in waiting)
        assert self.queue.flight_tokens == sum(one.num_tokens for one in flights)
        assert self.queue.has_flights == bool(flights)
        under_way = {*waiting, *(one.node for one in flights)}
        assert {node for node in self.sizes if self.queue.is_under_way(node)} == under_way


TestSpillQueue = SpillMachine.TestCase
TestSpillQueue.settings = settings(max_examples=150, stateful_step_count=40)
