"""A declined load is attempted once it gains: on all ranks in the same step, or on none."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from sglang_tiered.integration.cache.declined_loads import (
    ABSENT,
    DECLINED,
    LOOK_STEPS,
    MAX_ATTEMPTS,
    DeclinedLoads,
    told_end,
)
from sglang_tiered.integration.cache.loads import Loads, State
from sglang_tiered.integration.ranks import RankAgreement


class Rank:
    """Hears of requests and steps as a ``LoadScheduler`` does; the test says what gains."""

    def __init__(self, number: int, num_ranks: int) -> None:
        self.agreement = RankAgreement(is_first=number == 0, is_alone=num_ranks == 1)
        self.loads: Loads[str] = Loads()
        self.gains, self.num_plans = False, 0
        planner: Any = self
        self.declined = DeclinedLoads[str](planner)

    def end_by_now(self, request: str, *, num_ahead: int) -> int | None:
        self.num_plans += 1
        return 6400 if self.gains else None

    def arrives(self, request: str, *, is_held: bool = True) -> int | None:
        """What all ranks tell of its load: unknown yet, declined, absent, or where it ends."""
        self.loads.waits_again(request, State.DECLINED)
        place: Any = object()
        self.loads.of(request).place = place
        own = told_end(6400) if self.gains else DECLINED
        end = self.agreement.ask_ranks(request, own if is_held else ABSENT)
        if end is not None:
            self.agreement.drop_question(request)
            if end == DECLINED:
                self.declined.add(request)
        return end


class Ranks(list[Rank]):
    """Ranks in lockstep."""

    def __init__(self, number: int) -> None:
        super().__init__(Rank(rank, number) for rank in range(number))

    def exchange(self) -> None:
        if len(self) == 1:
            return
        questions = [list(rank.agreement._questions) for rank in self]
        assert all(asked == questions[0] for asked in questions)
        sent = [rank.agreement.values_to_send() for rank in self]
        for rank in self:
            rank.agreement.accept_values(functools.reduce(torch.minimum, sent).clone())

    def step(self) -> list[str]:
        """What all ranks attempt in one step."""
        self.exchange()
        attempts = [rank.declined.step(rank.agreement, num_ahead=0) for rank in self]
        assert all(each == attempts[0] for each in attempts)
        return attempts[0]

    def steps(self, number: int) -> list[str]:
        return [request for _ in range(number) for request in self.step()]

    def arrive(self, request: str, holders: list[bool] | None = None) -> None:
        held = holders or [True] * len(self)
        for _ in range(2):
            found = {
                rank.arrives(request, is_held=is_held)
                for rank, is_held in zip(self, held, strict=True)
            }
            if found != {None}:
                break
            self.exchange()
        assert len(found) == 1 and None not in found

    def gain(self, *, gains: bool) -> None:
        for rank in self:
            rank.gains = gains


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_load_is_attempted_no_more_than_allowed(num_ranks: int) -> None:
    """SGLang bounds attempts, and a request past them would wait for nothing."""
    ranks, attempts = Ranks(num_ranks), list[str]()
    ranks.arrive("r")
    assert not ranks.steps(3 * LOOK_STEPS), "it still gains nothing"
    for _ in range(2 * MAX_ATTEMPTS):
        ranks.gain(gains=True)
        attempts += ranks.steps(LOOK_STEPS + 1)
        for rank in ranks:
            rank.agreement.drop_question("r")
        ranks.gain(gains=False)
        ranks.arrive("r")
    assert attempts == ["r"] * MAX_ATTEMPTS


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_thousand_that_wait_cost_one_plan_a_step(num_ranks: int) -> None:
    ranks = Ranks(num_ranks)
    for number in range(1000):
        ranks.arrive(str(number))
    ranks.steps(5 * LOOK_STEPS)
    assert [rank.num_plans for rank in ranks] == [5] * num_ranks
    for _ in range(50):
        for rank in ranks:
            rank.declined.expect_prices()
        ranks.step()
        assert all(len(rank.agreement._questions) <= 1 for rank in ranks)
    assert all(rank.num_plans <= 5 + 55 for rank in ranks)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_attempt_alike_whatever_they_measure(seed: int) -> None:
    """``Ranks`` compares the questions and the attempts of every step."""
    source, ranks = random.Random(seed), Ranks(3)
    present: list[str] = []
    attempts: list[str] = []
    for number in range(400):
        chance = source.random()
        if chance < 0.2:
            present.append(str(number))
            ranks.arrive(present[-1], [source.random() < 0.8 for _ in ranks])
        elif chance < 0.3 and present:
            gone = present.pop(source.randrange(len(present)))
            for rank in ranks:
                rank.loads.drop(gone)
                rank.agreement.drop_question(gone)
        elif chance < 0.6:
            source.choice(ranks).gains = source.random() < 0.5
        if source.random() < 0.5:
            for rank in ranks:
                rank.declined.expect_prices()
        found = ranks.step()
        attempts += found
        for request in found:
            ranks.arrive(request)
    assert attempts
