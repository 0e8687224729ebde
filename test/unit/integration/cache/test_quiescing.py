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
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
    UpdateWeightFromDiskReqInput,
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


class Disk:
    """Calls of the storage wait until they may go on."""

    def __init__(self, cache: Any, name: str) -> None:
        self.entered, self._goes_on = threading.Event(), threading.Event()
        call: Callable[..., Any] = getattr(cache.storage, name)

        def held(*arguments: Any, **named: Any) -> Any:
            self.entered.set()
            assert self._goes_on.wait(DEADLINE_S)
            return call(*arguments, **named)

        setattr(cache.storage, name, held)

    def goes_on(self) -> None:
        self._goes_on.set()


def is_idle(cache: Any) -> bool:
    """Of a scheduler that SGLang takes for idle."""
    return hooks._after_is_fully_idle(True, SimpleNamespace(tree_cache=cache))


def begin_load(cache: Any) -> None:
    """As SGLang does, whether or not it pays."""
    cache.begin_load(PrefetchArguments(ASKER, cache.root_node_handle(None), TOKENS))
    assert ASKER in cache.ongoing_prefetch


@pytest.fixture
def reading(cache: Any) -> Disk:
    """A load is being read."""
    store(cache, TOKENS)
    flush(cache)
    disk = Disk(cache, "begin_load")
    begin_load(cache)
    step(cache, disk.entered.is_set)
    return disk


def test_aborted_load_keeps_the_scheduler_busy_until_read(cache: Any, reading: Disk) -> None:
    """SGLang's threads do not stop while they read, and a flush then ends the scheduler."""
    cache.release_aborted_request(ASKER)
    assert not cache.ongoing_prefetch
    assert not is_idle(cache)
    reading.goes_on()
    step(cache, lambda: is_idle(cache))
    flush(cache)


def test_ranks_become_idle_together_after_reads(
    cache: Any, reading: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A purge would empty the tree of one rank only, and the next collective would hang."""
    cache.release_aborted_request(ASKER)
    reading.goes_on()
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


def test_load_aborted_before_its_answer_keeps_ranks_busy(
    cache: Any,
) -> None:
    """A rank whose thread is stopped sooner would leave the others in the threads' collective."""
    begin_load(cache)
    cache.release_aborted_request(ASKER)
    assert not is_idle(cache)
    step(cache, lambda: is_idle(cache))


def test_measuring_the_disk_keeps_no_rank_busy(cache: Any) -> None:
    store(cache, TOKENS)
    entered, goes_on = threading.Event(), threading.Event()
    engine = cache.storage.region_engine
    submit = engine.submit_load

    def held(run: Any) -> Any:
        job = submit(run)
        wait = job.wait

        def wait_longer(timeout_s: float | None = None) -> bool:
            entered.set()
            return goes_on.wait(DEADLINE_S) and wait(timeout_s)

        job.wait = wait_longer
        return job

    engine.submit_load = held
    cache.storage.transfers.probe_tier(keys_of(TOKENS))
    try:
        assert entered.wait(DEADLINE_S)
        assert is_idle(cache)
    finally:
        goes_on.set()


# ---- Memory that is to be emptied now ----


def ends_with_the_gate(cache: Any, disk: Disk) -> None:
    """The disk answers as soon as no more stores are let in."""
    drop = cache.storage.drop_stores

    def drop_and_go_on(dropping: bool) -> None:
        drop(dropping)
        disk.goes_on()

    cache.storage.drop_stores = drop_and_go_on


def prompt(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + 2 * PAGE))


def begin_backlog(cache: Any) -> Disk:
    """The first of four prompts is being stored, the others wait for it."""
    disk = Disk(cache, "begin_store")
    for number in range(1, 5):
        compute(cache, prompt(number))
        step(cache, lambda: not cache.ongoing_write_through)
    step(cache, disk.entered.is_set)
    assert cache.ongoing_backup
    return disk


class Server:
    """SGLang's scheduler, which ends if something is under way as its memory is to be emptied."""

    def __init__(self, cache: Any) -> None:
        self.tree_cache = cache
        self.calls: list[str] = []
        self._engine_paused = False
        self.weight_updater = SimpleNamespace(
            _session=None,
            memory_saver_adapter=SimpleNamespace(enabled=False),
            offload_tags=set(),
        )
        self.waiting_queue: list[Any] = []
        self.disaggregation_mode = SimpleNamespace(value="null")
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.refuses_flushes = False
        self._request_dispatcher: Any = self.dispatch
        self.control = Control()
        self.control._scheduler, self.control._cache = self, self.tree_cache
        self.send = SchedulerMessages(self, self.control)

    def is_fully_idle(self, ignore_waiting: bool = False) -> bool:
        cache = self.tree_cache
        at_work = (cache.ongoing_backup, cache.ongoing_write_through, cache.ongoing_prefetch)
        return hooks._after_is_fully_idle(not any(at_work), self, ignore_waiting=ignore_waiting)

    def flush_cache(self, *, empty_cache: bool = True) -> bool:
        if self.refuses_flushes:
            return False
        flush(self.tree_cache)
        self.control.memory_was_flushed()
        return True

    def dispatch(self, message: Any) -> Any:
        tags = self.weight_updater.offload_tags
        if isinstance(message, ReleaseMemoryOccupationReqInput):
            assert self.is_fully_idle(), "the scheduler has ended"
            self.calls.append("released")
            tags.update(message.tags)
            flush(self.tree_cache)
            return ReleaseMemoryOccupationReqOutput()
        if isinstance(message, ResumeMemoryOccupationReqInput):
            for tag in message.tags:
                tags.remove(tag)
            self.calls.append("resumed")
            return ResumeMemoryOccupationReqOutput()
        assert isinstance(message, UpdateWeightFromDiskReqInput)
        self.calls.append("idle" if self.is_fully_idle() else "busy")
        return SimpleNamespace(success=self.flush_cache())


@pytest.fixture
def server(cache: Any) -> Server:
    return Server(cache)


RELEASE = ReleaseMemoryOccupationReqInput(tags=["kv_cache"])
RESUME = ResumeMemoryOccupationReqInput(tags=["kv_cache"])
UPDATE = UpdateWeightFromDiskReqInput(model_path="new", flush_cache=True)


def test_memory_is_released_while_stores_are_under_way(
    cache: Any,
    server: Server,
) -> None:
    disk = begin_backlog(cache)
    ends_with_the_gate(cache, disk)
    server.send(RELEASE)
    server.send(RESUME)
    assert server.calls == ["released", "resumed"]
    assert cache.storage.num_kept(keys_of(prompt(4))) == 0, "the backlog was waited for"
    store(cache, prompt(4))


def test_hanging_disk_refuses_a_release_of_memory(
    cache: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = begin_backlog(cache)
    monkeypatch.setattr(quiescing, "QUIESCE_S", 0.0)
    server.send(RELEASE)
    server.send(RESUME)
    assert server.calls == []
    disk.goes_on()
    step(cache, server.is_fully_idle)
    server.send(RELEASE)
    assert server.calls == ["released"]
    store(cache, prompt(4))


def test_load_under_way_is_aborted_for_a_release(cache: Any, server: Server, reading: Disk) -> None:
    ends_with_the_gate(cache, reading)
    server.send(RELEASE)
    assert server.calls == ["released"]
    store(cache, prompt(1))


def test_weight_update_leaves_no_old_kv_under_way(cache: Any, server: Server) -> None:
    disk = begin_backlog(cache)
    ends_with_the_gate(cache, disk)
    server.send(UPDATE)
    assert server.calls == ["idle"]
    assert not cache.hidden_tenants
    store(cache, prompt(4))


def test_old_kv_after_a_refused_flush_matches_nothing(
    cache: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = begin_backlog(cache)
    monkeypatch.setattr(quiescing, "QUIESCE_S", 0.0)
    server.refuses_flushes = True
    server.send(UPDATE)
    assert server.calls == ["busy"]
    assert cache.hidden_tenants.key_of(None, None) is not None
    disk.goes_on()
    step(cache, server.is_fully_idle)
    server.refuses_flushes = False
    server.control.after_idle()
    assert not cache.hidden_tenants
    store(cache, prompt(4))


def test_stores_end_while_generation_is_paused(
    cache: Any,
) -> None:
    begin_backlog(cache).goes_on()
    paused = SimpleNamespace(tree_cache=cache)
    deadline = time.monotonic() + DEADLINE_S
    while cache.ongoing_backup:
        assert time.monotonic() < deadline
        hooks._after_pause(None, paused)


def test_ranks_come_to_rest_in_the_same_step(
    cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as held:
        other = make_cache(str(tmp_path / "other"), held)
        caches = (cache, other)
        disks = [begin_backlog(each) for each in caches]
        disks[0].goes_on()  # long before the other
        ends_with_the_gate(other, disks[1])
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
            for rank, each in enumerate(caches):
                patch.setattr(each, "_all_reduce_attn_groups", reduce_as(rank))
            ended = [pool.submit(each.quiesce) for each in caches]
            assert [each.result(DEADLINE_S) for each in ended] == [True, True]
        assert barrier.n_waiting == 0
        other.release_host_resources()
