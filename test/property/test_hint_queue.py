"""Whatever happens to them, hints keep their bound, their order and their end."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_tiered.integration.cache import hints
from sglang_tiered.integration.cache.hints import LIFE_S, Chain, Hint, HintQueue

CAPACITY, MAX_HINTS = 100, 6
CHAINS = st.sampled_from("abcdefghij")


class HintMachine(RuleBasedStateMachine):
    """A scheduler that does with its hints what the rules say."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(hints, "MAX_HINTS", MAX_HINTS)
        self.queue = HintQueue(CAPACITY)
        self.now = 0.0
        self.active: list[str] = []  # in the order of their turns
        self.told: dict[str, str] = {}

    def teardown(self) -> None:
        self.patch.undo()

    @rule(chain=CHAINS, wanted=st.integers(1, 150))
    def hint(self, chain: str, wanted: int) -> None:
        if chain in self.active:
            return  # the caller has looked it up
        self.queue.remove(chain)
        room = self.queue.room_for(wanted)
        taken = min(wanted, CAPACITY)  # one hint never takes more than all may
        fits = len(self.queue) < MAX_HINTS and self.queue.num_tokens + taken <= CAPACITY
        assert room == (taken if fits else 0)
        self.told.pop(chain, None)
        if room:
            self.queue.add(Hint(Chain(array("q"), None, None, [chain])), room, self.now)
            self.active.append(chain)

    @rule(num_tokens=st.integers(0, 200))
    def end_of_turn(self, num_tokens: int) -> None:
        hint = self.queue.next()
        if hint is not None:
            self.queue.served(hint, num_tokens)
            self.active.remove(hint.name)

    @rule(chain=CHAINS)
    def withdraw(self, chain: str) -> None:
        hint = self.queue.get(chain)
        if hint is not None and hint.is_active:
            self.drop(hint, "memory")

    @rule(chain=CHAINS)
    def use(self, chain: str) -> None:
        hint = self.queue.get(chain)
        if hint is not None and not hint.is_active:
            self.queue.remove(chain)
            self.told.pop(chain, None)

    @rule(seconds=st.floats(0.0, LIFE_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(2 * MAX_HINTS):
            oldest = self.queue.oldest()
            if oldest is None or self.now < oldest.until:
                return
            if oldest.is_active:
                self.drop(oldest, "over")
            else:
                self.queue.remove(oldest.name)
                self.told.pop(oldest.name, None)
        raise AssertionError("lives do not end")

    def drop(self, hint: Hint, why: str) -> None:
        self.queue.drop(hint, why, self.now)
        self.active.remove(hint.name)
        self.told[hint.name] = why

    @invariant()
    def order_and_bounds(self) -> None:
        hints = list(self.queue)
        assert self.queue.num_tokens == sum(hint.num_tokens for hint in hints) <= CAPACITY
        assert len(hints) == len(self.queue) <= MAX_HINTS
        assert not any(hint.is_active and hint.why_dropped for hint in hints)
        hint = self.queue.next()
        assert (None if hint is None else hint.name) == (self.active[0] if self.active else None)
        for chain, why in self.told.items():
            dropped = self.queue.get(chain)
            assert dropped is not None and dropped.why_dropped == why
            assert dropped.num_tokens == 0


TestHintMachine = HintMachine.TestCase
TestHintMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
