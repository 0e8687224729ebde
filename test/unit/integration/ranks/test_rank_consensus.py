"""What ranks agree on, exchanged as SGLang does: the minimum of each number over the ranks."""

from __future__ import annotations

import ast
import functools
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_tiered.integration import ranks as rank_consensus
from sglang_tiered.integration.ranks import MAX_ANSWERS, RankAgreement, first_ranks


def make_ranks(number: int) -> list[RankAgreement]:
    return [RankAgreement(is_first=rank == 0, is_alone=number == 1) for rank in range(number)]


def exchange(ranks: list[RankAgreement]) -> None:
    reduced = functools.reduce(torch.minimum, [rank.values_to_send() for rank in ranks])
    for rank in ranks:
        rank.accept_values(reduced.clone())


def test_question_is_answered_with_the_least_value() -> None:
    ranks = make_ranks(2)
    first = [rank.ask_ranks("a", own) for rank, own in zip(ranks, (640, 192), strict=True)]
    assert first == [rank.ask_ranks("b", 0) for rank in ranks] == [None, None]
    for _ in range(2):  # until it is forgotten
        exchange(ranks)
        assert [rank.ask_ranks("b", 999) for rank in ranks] == [0, 0]
        assert [rank.ask_ranks("a", 999) for rank in ranks] == [192, 192]
    for rank in ranks:
        rank.drop_question("a")
        rank.drop_question("never asked")
    assert [rank.ask_ranks("a", 5) for rank in ranks] == [None, None]


def test_forgotten_question_gets_no_old_answer() -> None:
    ranks = make_ranks(2)
    for rank in ranks:
        rank.ask_ranks("answered", 1)
    exchange(ranks)
    for rank in ranks:
        rank.ask_ranks("pending", 2)
        rank.drop_all()
        assert len(rank.values_to_send()) == 0
        assert rank.ask_ranks("answered", 3) is None
    exchange(ranks)
    assert [rank.ask_ranks("answered", 9) for rank in ranks] == [3, 3]


def test_untaken_answers_are_bounded_and_newest_stay() -> None:
    ranks = make_ranks(2)
    for number in range(MAX_ANSWERS + 10):
        for rank in ranks:
            rank.ask_ranks(number, number)
    exchange(ranks)
    assert [rank.ask_ranks(0, 77) for rank in ranks] == [None, None]
    assert [rank.ask_ranks(MAX_ANSWERS + 9, 77) for rank in ranks] == [MAX_ANSWERS + 9] * 2


def test_single_rank_agrees_with_itself_at_once() -> None:
    (alone,) = make_ranks(1)
    assert alone.ask_ranks("a", 5) == 5
    assert not len(alone.values_to_send()), "no question waits for an exchange that never comes"


def test_ranks_that_ask_at_random_never_differ() -> None:
    """Every rank measures something else; what each sees is the same at every moment."""
    source = random.Random(0)
    ranks = make_ranks(3)
    for _ in range(300):
        question = source.randrange(20)
        if source.random() < 0.3:
            exchange(ranks)
        seen = {rank.ask_ranks(question, source.randrange(1000)) for rank in ranks}
        assert len(seen) == 1
        if source.random() < 0.2:
            for rank in ranks:
                rank.drop_question(question)


def test_integration_calls_no_collective_of_its_own() -> None:
    """Values travel in SGLang's exchange; one collective more per request or step is a bug."""
    collectives = {
        *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "barrier"),
        *("broadcast", "broadcast_object_list", "broadcast_pyobj", "gather", "reduce", "scatter"),
        *("send", "recv", "isend", "irecv", "attn_cp_tp_broadcast_pyobj", "point_to_point_pyobj"),
        *("_all_reduce", "_all_reduce_attn_groups", "_pp_sync"),
    }
    called = {
        (path.name, ast.unparse(node.func))
        for path in Path(rank_consensus.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in collectives
    }
    assert called == {
        ("radix_cache.py", "super()._all_reduce"),
        ("ranks.py", "cache._all_reduce_attn_groups"),
        ("host_size.py", "torch.distributed.all_reduce"),
        ("shared_pages.py", "get_parallel().attn_tp_group.all_gather_object"),
        ("device_memory.py", "gather"),  # of pages within a pool, by a kernel
        ("device_memory.py", "scatter"),
        ("service.py", "asyncio.gather"),  # of answers, in the HTTP process
        ("request_names.py", "reading.send"),  # to a generator, there too
        ("calls.py", "steps.send"),  # to a generator
    }


@pytest.mark.parametrize("length", [0, 1, 6, 7, 8, 1000])
def test_first_ranks_bytes_reach_every_rank(length: int) -> None:
    """Two ranks in threads, whose reductions meet at a barrier."""
    data = random.Random(length).randbytes(length)
    sent = {0: data, 1: b"another rank's, and longer" * 100}
    barrier, parts, told = threading.Barrier(2, timeout=60), {}, {}

    def run(rank: int) -> None:
        group = SimpleNamespace(rank=lambda: rank, size=lambda: 2)

        def reduce(values: torch.Tensor, operator: object) -> None:
            assert operator == torch.distributed.ReduceOp.MIN
            parts[rank] = values.clone()
            barrier.wait()
            least = torch.minimum(parts[0], parts[1])
            barrier.wait()
            values.copy_(least)

        cache: Any = SimpleNamespace(
            attn_cp_group=None, attn_tp_group=group, tp_world_size=2, _all_reduce_attn_groups=reduce
        )
        told[rank] = first_ranks(cache, sent[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in sent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == {0: data, 1: data}
