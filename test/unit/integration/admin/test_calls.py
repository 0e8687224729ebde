"""Calls over several ranks, each a thread: the same exchanges in the same order, or all hang."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sglang_tiered.api import CallError
from sglang_tiered.integration.admin import calls
from sglang_tiered.integration.admin.calls import Calls, Work

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_RANKS = 2
NOT_YET: dict[str, Any] = {"done": False}


class Ranks:
    """Ranks whose calls begin with ``begin``, which is told the rank."""

    def __init__(self, begin: Callable[[int], Any]) -> None:
        self._barrier = threading.Barrier(NUM_RANKS, timeout=20)
        self._told: list[torch.Tensor] = [torch.empty(0)] * NUM_RANKS
        self._calls = [
            Calls({"call": lambda *_, rank=rank: begin(rank)}) for rank in range(NUM_RANKS)
        ]

    def _exchange(self, rank: int, data: torch.Tensor) -> None:
        self._told[rank] = data.clone()
        self._barrier.wait()
        assert len({len(each) for each in self._told}) == 1, "they tell different things"
        data.copy_(torch.stack(self._told).amin(dim=0))
        self._barrier.wait()

    def _ask(self, rank: int, number: str, body: dict[str, Any]) -> Any:
        cache: Any = SimpleNamespace(
            _all_reduce_attn_groups=lambda data, _: self._exchange(rank, data)
        )
        try:
            return self._calls[rank].answer(cache, "call", number, body)
        except threading.BrokenBarrierError:
            raise
        except Exception as error:
            return str(error)

    def ask(self, number: str = "n", **body: Any) -> list[Any]:
        """One question; the answers of all ranks."""
        with ThreadPoolExecutor(NUM_RANKS) as threads:
            asked = [threads.submit(self._ask, rank, number, body) for rank in range(NUM_RANKS)]
            return [each.result() for each in asked]


@pytest.mark.parametrize("failing", range(NUM_RANKS))
@pytest.mark.parametrize("where", ["begin", "values", "answer"])
def test_failure_of_one_rank_reaches_all(where: str, failing: int) -> None:
    def begin(rank: int) -> Work:
        def fails(step: str) -> None:
            if where == step and rank == failing:
                raise OSError("a disk")

        def values() -> list[int]:
            fails("values")
            return [1, 2]

        def answer(_: list[int]) -> Any:
            fails("answer")
            return {"done": True}

        fails("begin")
        return Work(values, answer)

    ranks = Ranks(begin)
    told = ["a disk" if rank == failing else calls.ELSEWHERE for rank in range(NUM_RANKS)]
    if where == "answer":
        assert ranks.ask(rid="r")[failing] == "a disk"
    assert ranks.ask(rid="r") == told
    assert ranks.ask(rid="r") == told, "it begins once"


def test_least_of_all_ranks_counts() -> None:
    held = [5, 3]
    ranks = Ranks(lambda rank: Work(lambda: [held[rank]], lambda least: {"num": least}))
    assert ranks.ask(rid="r") == [{"num": [3]}] * NUM_RANKS
    held[1] = 9
    assert ranks.ask() == [{"num": [3]}] * NUM_RANKS, "it has ended, and keeps its answer alone"


def test_what_follows_is_asked_next_time() -> None:
    second = Work(list, lambda _: {"done": True})
    ranks = Ranks(lambda _: Work(lambda: [7], lambda _: second))
    assert ranks.ask(rid="r") == [NOT_YET] * NUM_RANKS
    assert ranks.ask() == [{"done": True}] * NUM_RANKS


def test_refusal_is_an_answer_like_others() -> None:
    def begin(_: int) -> Work:
        raise CallError("full", 409)

    ranks = Ranks(begin)
    for _ in range(2):
        assert ranks.ask(rid="r") == [{"error": "full", "status": 409}] * NUM_RANKS


def test_ended_calls_give_way_to_those_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_MAX_ENTRIES", 2)
    ends = False
    ranks = Ranks(lambda _: {"done": True} if ends else Work(list, lambda _: NOT_YET))
    ranks.ask("1", rid="r")
    ranks.ask("2", rid="r")
    ends = True
    for number in ("3", "4"):
        assert ranks.ask(number, rid="r") == [{"done": True}] * NUM_RANKS
    assert ranks.ask("1") == ranks.ask("2") == [NOT_YET] * NUM_RANKS
    ends = False
    assert ranks.ask("5", rid="r") == [NOT_YET] * NUM_RANKS
    assert ranks.ask("1")[0]["status"] == 503, "the oldest was dropped"
