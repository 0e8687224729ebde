"""A load that was declined is attempted again once it gains: on all ranks in the same step, or on
none, and at one plan a step."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable

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
from sglang_tiered.integration.cache.load_planner import LoadPlanner
from sglang_tiered.integration.cache.loads import State
from sglang_tiered.integration.ranks import RankAgreement
from sglang_tiered.policy.cost_model import CostModel, LoadDecision, PrefillCost, TransferCost

TOKEN_S = 1e-4
BYTES_PER_TOKEN = 1000
NUM_HELD, NUM_NEW = 6400, 6500
GOOD_S, BAD_S = 1e-2, 30.0  # to read a MiB


class Rank:
    """What decides on one rank. It hears of requests and steps as a ``LoadScheduler`` does."""

    def __init__(self, number: int, num_ranks: int, read_s: float) -> None:
        costs = CostModel(
            page_tokens=64,
            bytes_per_token=BYTES_PER_TOKEN,
            prefill=PrefillCost((1e-3, TOKEN_S, 0.0)),
            transfers=[TransferCost((1e-6, 1e-8))],
        )
        self.now = 100.0
        self.planner: LoadPlanner[str] = LoadPlanner(costs, lambda: self.now)
        self.agreement = RankAgreement(is_first=number == 0, is_alone=num_ranks == 1)
        self.declined = DeclinedLoads(self.planner)
        self.num_plans = 0
        plan = costs.plan

        def count_and_plan(**given: object) -> object:
            self.num_plans += 1
            return plan(**given)  # type: ignore[arg-type]

        costs.plan = count_and_plan  # type: ignore[assignment, method-assign]
        self.reads_in(read_s)

    def reads_in(self, seconds: float) -> None:
        """Its disk takes so long from now on, and that is known."""
        for _ in range(8):
            read = self.planner.begin_read(1 << 20)
            self.now += seconds
            self.planner.end_read(read, is_complete=True)
        self.planner.learn()

    def arrives(self, request: str, num_held: int = NUM_HELD) -> int | None:
        """Where all ranks end its load: unknown yet, declined, or begun."""
        self.planner.loads.waits_again(request, State.DECLINED)
        num_planned = self.planner.arrives(
            request, num_held=num_held, num_new=NUM_NEW, num_before=0, num_ahead=0
        )
        nothing = DECLINED if num_held else ABSENT
        own = told_end(num_planned) if num_planned else nothing
        end = self.agreement.ask_ranks(request, own)
        end = end if end is None or end < 0 else end // 2
        if end is not None:
            self.agreement.drop_question(request)
            if end == DECLINED:
                self.declined.add(request)
        return end

    def leaves(self, request: str) -> None:
        self.planner.leaves(request)
        self.agreement.drop_question(request)


class Ranks(list[Rank]):
    """Ranks in lockstep."""

    def __init__(self, read_s: Iterable[float]) -> None:
        all_s = list(read_s)
        super().__init__(Rank(number, len(all_s), each_s) for number, each_s in enumerate(all_s))

    def exchange(self) -> None:
        if len(self) == 1:
            return
        questions = [list(rank.agreement._questions) for rank in self]
        assert all(asked == questions[0] for asked in questions)
        reduced = functools.reduce(
            torch.minimum, [rank.agreement.values_to_send() for rank in self]
        )
        for rank in self:
            rank.agreement.accept_values(reduced.clone())

    def step(self) -> list[str]:
        """What all ranks attempt in one step."""
        self.exchange()
        attempts = []
        for rank in self:
            rank.planner.step()
            attempts.append(rank.declined.step(rank.agreement, num_ahead=0))
        assert all(each == attempts[0] for each in attempts)
        return attempts[0]

    def arrive(self, *requests: str, num_held: Iterable[int] | None = None) -> list[int]:
        """Where their loads end, once the ranks agree."""
        held = [NUM_HELD] * len(self) if num_held is None else list(num_held)
        ends = []
        for request in requests:
            found = {rank.arrives(request, num) for rank, num in zip(self, held, strict=True)}
            if found == {None}:
                self.exchange()
                found = {rank.arrives(request, num) for rank, num in zip(self, held, strict=True)}
            (end,) = found
            assert end is not None
            ends.append(end)
        return ends

    def read_in(self, seconds: float) -> None:
        for rank in self:
            rank.reads_in(seconds)

    def expect_prices(self) -> None:
        for rank in self:
            rank.declined.expect_prices()

    def steps(self, number: int) -> list[str]:
        return [request for _ in range(number) for request in self.step()]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_declined_load_begins_once_its_tier_recovers(num_ranks: int) -> None:
    """A price that was wrong for a moment must not cost all that wait their prefixes."""
    ranks = Ranks([BAD_S] * num_ranks)
    assert ranks.arrive("a", "b") == [DECLINED, DECLINED]
    assert ranks.steps(3 * LOOK_STEPS) == []
    ranks.read_in(GOOD_S)
    assert sorted(ranks.steps(2 * LOOK_STEPS + 1)) == ["a", "b"]
    # Several ranks have agreed by then: the attempt waits for no exchange.
    assert {rank.arrives("a") for rank in ranks} == {NUM_HELD}
    for rank in ranks:
        rank.leaves("b")
    assert ranks.steps(2 * LOOK_STEPS) == []
    assert [rank.planner.tokens[LoadDecision.DECLINED] for rank in ranks] == [6400] * num_ranks


@pytest.mark.parametrize("slow", [0, 1])
def test_load_that_one_rank_computes_sooner_waits(slow: int) -> None:
    ranks = Ranks([GOOD_S, GOOD_S])
    ranks[slow].reads_in(BAD_S)
    assert ranks.arrive("r") == [DECLINED]
    assert ranks.steps(3 * LOOK_STEPS) == []
    ranks[slow].reads_in(GOOD_S)
    assert ranks.steps(LOOK_STEPS + 1) == ["r"]


def test_prefix_one_rank_lacks_is_not_planned_again() -> None:
    ranks = Ranks([GOOD_S, BAD_S, GOOD_S])
    assert ranks.arrive("r", num_held=[NUM_HELD, NUM_HELD, 0]) == [ABSENT]
    before = [rank.num_plans for rank in ranks]
    ranks.steps(3 * LOOK_STEPS)
    assert [rank.num_plans for rank in ranks] == before


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_load_is_attempted_no_more_than_allowed(num_ranks: int) -> None:
    """SGLang bounds attempts, and a request past them would wait for nothing."""
    ranks = Ranks([BAD_S] * num_ranks)
    ranks.arrive("r")
    attempts = []
    for _ in range(2 * MAX_ATTEMPTS):
        ranks.read_in(GOOD_S)
        attempts += ranks.steps(LOOK_STEPS + 1)
        for rank in ranks:
            rank.agreement.drop_question("r")
        ranks.read_in(BAD_S)
        ranks.arrive("r")
    assert attempts == ["r"] * MAX_ATTEMPTS


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_thousand_that_wait_cost_one_plan_a_step(num_ranks: int) -> None:
    ranks = Ranks([BAD_S] * num_ranks)
    ranks.arrive(*map(str, range(1000)))
    before = [rank.num_plans for rank in ranks]
    ranks.steps(5 * LOOK_STEPS)
    assert [rank.num_plans for rank in ranks] == [num + 5 for num in before]
    for _ in range(50):
        ranks.expect_prices()
        ranks.step()
        assert all(len(rank.agreement._questions) <= 1 for rank in ranks)
    assert all(rank.num_plans - num <= 55 for rank, num in zip(ranks, before, strict=True))


@pytest.mark.parametrize("end", ["admitted", "arrives again"])
def test_request_that_moved_on_is_not_attempted(end: str) -> None:
    """It was asked about, and no rank knows yet what the others said."""
    ranks = Ranks([BAD_S] * 2)
    ranks.arrive("r")
    ranks.read_in(GOOD_S)
    ranks.expect_prices()
    assert ranks.step() == []
    for rank in ranks:
        assert "r" in rank.agreement._questions
        if end == "admitted":
            rank.leaves("r")
        else:
            assert rank.arrives("r") is None
    assert ranks.steps(2 * LOOK_STEPS) == []
    if end == "arrives again":
        assert {rank.arrives("r") for rank in ranks} == {NUM_HELD}
    assert not any(rank.agreement._answers for rank in ranks)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_attempt_alike_whatever_they_measure(seed: int) -> None:
    """``Ranks`` compares the questions and the attempts of every step."""
    source = random.Random(seed)
    ranks = Ranks([BAD_S] * 3)
    present: list[str] = []
    attempts: list[str] = []
    for number in range(400):
        chance = source.random()
        if chance < 0.2:
            present.append(str(number))
            held = [source.choice([0, 640, NUM_HELD, NUM_HELD, NUM_HELD]) for _ in ranks]
            ranks.arrive(present[-1], num_held=held)
        elif chance < 0.3 and present:
            gone = present.pop(source.randrange(len(present)))
            for rank in ranks:
                rank.leaves(gone)
        elif chance < 0.6:
            source.choice(ranks).reads_in(source.choice([GOOD_S, BAD_S]))
        if source.random() < 0.5:
            ranks.expect_prices()
        found = ranks.step()
        attempts += found
        for request in found:
            ranks.arrive(request)
    assert attempts
