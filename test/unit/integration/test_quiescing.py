"""What storage threads still do: the same answer on all ranks, and an end that nobody dies of."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from small_cache import TOKENS, flush, keys_of, step, store

from sglang_tiered.integration import hooks
from sglang_tiered.integration.load_scheduling import LoadingRadixCache

if TYPE_CHECKING:
    from collections.abc import Callable

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
    prefetch = super(LoadingRadixCache, cache).prefetch_from_storage
    prefetch(ASKER, cache.root_node_handle(None), TOKENS)
    assert ASKER in cache.ongoing_prefetch


@pytest.fixture
def reading(cache: Any) -> Disk:
    """A load is being read."""
    store(cache, TOKENS)
    flush(cache)
    disk = Disk(cache, "batch_get_v1")
    begin_load(cache)
    step(cache, disk.entered.is_set)
    return disk


def test_load_that_was_given_up_keeps_the_scheduler_busy_until_it_is_read(
    cache: Any, reading: Disk
) -> None:
    """SGLang's threads do not stop while they read, and a flush then ends the scheduler."""
    cache.release_aborted_request(ASKER)
    assert not cache.ongoing_prefetch
    assert not is_idle(cache)
    reading.goes_on()
    step(cache, lambda: is_idle(cache))
    flush(cache)


def test_rank_that_has_read_is_idle_no_sooner_than_one_that_has_not(
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


def test_load_given_up_before_it_is_known_what_is_held_keeps_ranks_busy_until_they_know(
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
    cache.storage.transfers.probe(keys_of(TOKENS))
    try:
        assert entered.wait(DEADLINE_S)
        assert is_idle(cache)
    finally:
        goes_on.set()
