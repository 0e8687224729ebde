"""Calls over several ranks, each a thread: the same exchanges in the same order, or all hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_tiered.api import CallError
from sglang_tiered.integration.admin import calls
from sglang_tiered.integration.admin.calls import Calls, Steps

NUM_RANKS = 2
NOT_YET: dict[str, Any] = {"done": False}


class Ranks:
    """Ranks whose calls begin with ``begin``, which is told the rank."""

    def __init__(self, begin: Callable[[int], Any]) -> None:
        self._barrier = threading.Barrier(NUM_RANKS, timeout=20)
        self._told: list[torch.Tensor] = [torch.empty(0)] * NUM_RANKS
        begins = [lambda *_, rank=rank: begin(rank) for rank in range(NUM_RANKS)]
        self._calls = [Calls({"call": each}) for each in begins]

    def _exchange(self, rank: int, data: torch.Tensor) -> None:
        self._told[rank] = data.clone()
        self._barrier.wait()
        assert len({len(each) for each in self._told}) == 1, "they tell different things"
        data.copy_(torch.stack(self._told).amin(dim=0))
        self._barrier.wait()

    def _ask(self, rank: int, number: str, body: dict[str, Any]) -> Any:
        group = SimpleNamespace(size=lambda: NUM_RANKS, rank=lambda: rank)
        cache: Any = SimpleNamespace(attn_tp_group=group, attn_cp_group=None)
        cache._all_reduce_attn_groups = lambda data, _: self._exchange(rank, data)
        cache.tp_world_size = NUM_RANKS
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
@pytest.mark.parametrize("step", range(4))
def test_failure_of_one_rank_reaches_all(step: int, failing: int) -> None:
    """Wherever it is: the others would wait for that rank in their next exchange."""

    def begin(rank: int) -> Steps:
        def fails(at: int) -> None:
            if at == step and rank == failing:
                raise OSError("a disk")

        fails(0)
        yield [1, 2]
        fails(1)
        yield b"a name"
        fails(2)
        yield NOT_YET
        fails(3)
        return {"done": True}

    ranks = Ranks(begin)
    told = ["a disk" if rank == failing else calls.ELSEWHERE for rank in range(NUM_RANKS)]
    if step == 3:
        assert ranks.ask(rid="r") == [NOT_YET] * NUM_RANKS
    assert ranks.ask(rid="r") == told
    assert ranks.ask(rid="r") == told, "it begins once"


@pytest.mark.parametrize("other", ["more numbers", "bytes", "an answer", "a refusal", "an end"])
def test_ranks_that_part_fail_and_none_waits(other: str) -> None:
    def begin(rank: int) -> Steps:
        if rank == 0 or other == "more numbers":
            yield [1] * (1 + rank)
        elif other == "bytes":
            yield b"a name"
        elif other == "an answer":
            yield NOT_YET
        elif other == "a refusal":
            raise CallError("full", 409)
        return {"done": True}

    assert Ranks(begin).ask(rid="r") == [calls.ELSEWHERE] * NUM_RANKS


def test_least_numbers_and_first_bytes_count() -> None:
    held = [5, 3]

    def begin(rank: int) -> Steps:
        (least,) = yield [held[rank]]
        return {"num": least, "name": (yield f"rank {rank}".encode())}

    ranks = Ranks(begin)
    expected = [{"num": 3, "name": b"rank 0"}] * NUM_RANKS
    assert ranks.ask(rid="r") == expected
    held[1] = 9
    assert ranks.ask() == expected, "it has ended, and keeps its answer alone"


def test_ended_calls_give_way_to_those_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_MAX_ENTRIES", 2)
    ends = False

    def begin(_: int) -> Steps:
        while not ends:
            yield NOT_YET
        return {"done": True}

    ranks = Ranks(begin)
    ranks.ask("1", rid="r")
    ends = True
    for number in "234":
        assert ranks.ask(number, rid="r") == [{"done": True}] * NUM_RANKS
    ends = False
    assert ranks.ask("1") == [NOT_YET] * NUM_RANKS
    for number in "56":
        ranks.ask(number, rid="r")
    assert ranks.ask("1")[0]["status"] == 503, "the oldest was dropped"
