"""What storage threads still do: the same answer on all ranks, and an end that nobody dies of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import (
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from small_cache import PAGE, TOKENS, compute, flush, keys_of, make_cache, step, store

from sglang_tiered.integration import hooks
from sglang_tiered.integration.admin.control import Control
from sglang_tiered.integration.cache import quiescing
from sglang_tiered.integration.cache.loads import PrefetchArguments
from sglang_tiered.integration.scheduler_messages import SchedulerMessages

DEADLINE_S = 60.0
ASKER = CacheRequestHandle("asker", 0)


def is_idle(cache: Any) -> bool:
    """Of a scheduler that SGLang takes for idle."""
    return hooks._after_is_fully_idle(True, SimpleNamespace(tree_cache=cache))


def begin_load(cache: Any) -> None:
    """As SGLang does, whether or not it pays."""
    cache.begin_load(PrefetchArguments(ASKER, cache.root_node_handle(None), TOKENS))
    assert ASKER in cache.ongoing_prefetch


def wait_for_disk(cache: Any) -> None:
    """Until it has something to do."""
    step(cache, lambda: cache.storage.region_engine.stats().num_inflight_jobs > 0)


@pytest.fixture
def reading(cache: Any, disk: threading.Event) -> threading.Event:
    """A load is being read."""
    store(cache, TOKENS)
    flush(cache)
    disk.clear()
    begin_load(cache)
    wait_for_disk(cache)
    return disk


def test_aborted_load_keeps_the_scheduler_busy_until_read(
    cache: Any, reading: threading.Event
) -> None:
    """SGLang's threads do not stop while they read, and a flush then ends the scheduler."""
    cache.release_aborted_request(ASKER)
    assert not cache.ongoing_prefetch
    assert not is_idle(cache)
    reading.set()
    step(cache, lambda: is_idle(cache))
    flush(cache)


def test_ranks_become_idle_together_after_reads(
    cache: Any, reading: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A purge would empty the tree of one rank only, and the next collective would hang."""
    cache.release_aborted_request(ASKER)
    reading.set()
    others_are_reading = True

    def other_rank(data: Any, op: Any) -> None:
        if others_are_reading:
            data[3] = 0  # ends of loads

    monkeypatch.setattr(cache, "_all_reduce_attn_groups", other_rank)
    controller = cache.cache_controller
    step(cache, lambda: any(ack.completed_req for ack in list(controller.ack_prefetch_queue.queue)))
    assert not is_idle(cache), "by what its own disk did"
    others_are_reading = False
    step(cache, lambda: is_idle(cache))


def test_load_aborted_before_its_answer_keeps_ranks_busy(cache: Any) -> None:
    """A rank whose thread is stopped sooner would leave the others in the threads' collective."""
    begin_load(cache)
    cache.release_aborted_request(ASKER)
    assert not is_idle(cache)
    step(cache, lambda: is_idle(cache))


def test_measuring_the_disk_keeps_no_rank_busy(cache: Any, disk: threading.Event) -> None:
    store(cache, TOKENS)
    disk.clear()
    cache.storage.probe_tier(keys_of(TOKENS))
    wait_for_disk(cache)
    assert is_idle(cache)


def prompt(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + 2 * PAGE))


def begin_backlog(cache: Any) -> None:
    """The first of four prompts is being stored, the others wait for it."""
    for number in range(1, 5):
        compute(cache, prompt(number))
        step(cache, lambda: not cache.ongoing_write_through)
    step(cache, lambda: bool(cache.ongoing_backup))


def goes_on_with_the_gate(cache: Any, goes_on: threading.Event) -> None:
    """The disk answers as soon as no more stores are let in."""
    drop = cache.storage.drop_stores
    cache.storage.drop_stores = lambda dropping: (drop(dropping), goes_on.set())


def test_only_what_has_begun_is_waited_for(cache: Any, hang: threading.Event) -> None:
    begin_backlog(cache)
    goes_on_with_the_gate(cache, hang)
    assert cache.quiesce()
    assert is_idle(cache) and not cache.is_under_way()
    flush(cache)
    assert cache.storage.num_kept(keys_of(prompt(4))) == 0, "the backlog was waited for"
    store(cache, prompt(4))


def test_hanging_disk_refuses_to_come_to_rest(
    cache: Any, hang: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang ends a scheduler that is busy as its memory is to be released."""
    begin_backlog(cache)
    sent: list[Any] = []
    scheduler = SimpleNamespace(
        tree_cache=cache,
        _request_dispatcher=sent.append,
        weight_updater=SimpleNamespace(offload_tags=set()),
    )
    send = SchedulerMessages(scheduler, Control())
    monkeypatch.setattr(quiescing, "QUIESCE_S", 0.0)
    assert not cache.quiesce()
    send(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
    send(ResumeMemoryOccupationReqInput(tags=["kv_cache"]))
    assert not sent
    hang.set()
    step(cache, lambda: not cache.is_under_way())
    assert cache.quiesce()
    flush(cache)
    store(cache, prompt(4))


def test_load_under_way_is_aborted_for_rest(cache: Any, reading: threading.Event) -> None:
    goes_on_with_the_gate(cache, reading)
    assert cache.quiesce()
    assert not cache.ongoing_prefetch and is_idle(cache)
    flush(cache)
    store(cache, prompt(1))


def test_stores_end_while_generation_is_paused(cache: Any, hang: threading.Event) -> None:
    begin_backlog(cache)
    hang.set()
    paused = SimpleNamespace(tree_cache=cache)
    deadline = time.monotonic() + DEADLINE_S
    while cache.ongoing_backup:
        assert time.monotonic() < deadline
        hooks._after_pause(None, paused)


def test_ranks_come_to_rest_in_the_same_step(
    cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: threading.Event
) -> None:
    with ExitStack() as held:
        other = make_cache(str(tmp_path / "other"), held)
        goes_on, begin = threading.Event(), other.storage.begin_store
        other.storage.begin_store = lambda *given: goes_on.wait(DEADLINE_S) and begin(*given)
        for each in (cache, other):
            begin_backlog(each)
        hang.set()  # of the first, long before the other
        goes_on_with_the_gate(other, goes_on)
        barrier = threading.Barrier(2, timeout=DEADLINE_S)
        sent: list[Any] = [None, None]

        def reduce_as(rank: int) -> Callable[[Any, Any], None]:
            def reduce(data: Any, op: Any) -> None:
                sent[rank] = data.clone()
                barrier.wait()
                least = torch.minimum(*sent)
                barrier.wait()
                data.copy_(least)

            return reduce

        with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
            for rank, each in enumerate((cache, other)):
                patch.setattr(each, "_all_reduce_attn_groups", reduce_as(rank))
            ended = [pool.submit(each.quiesce) for each in (cache, other)]
            assert [each.result(DEADLINE_S) for each in ended] == [True, True]
        assert barrier.n_waiting == 0
        other.release_host_resources()
