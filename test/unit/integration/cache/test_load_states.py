"""Random calls of SGLang's scheduler change the states of loads as the table says."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from cache_world import PAGE, CacheWorld, prompt
from load_states import LoadWatch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

from sglang_tiered.integration.cache.loads import Turns
from sglang_tiered.integration.ranks import SILENT
from sglang_tiered.policy.cost_model import PrefillCost

NUM_PROMPTS, MAX_WAITING, NUM_EVENTS = 8, 12, 600
MAX_ATTEMPTS = 8  # of SGLang's own, for a request


class RandomRequests:
    """What a scheduler does with requests that come, wait, start and are aborted, in any order."""

    def __init__(self, world: CacheWorld, disk: threading.Event, seed: int) -> None:
        self.world, self.cache, self.disk = world, world.cache, disk
        self.rnd = random.Random(seed)
        self.now = 0.0
        self.waiting: list[Any] = []
        self.num_asked = 0
        self.watch = LoadWatch(world.cache)

    def run(self) -> None:
        events = (
            *(self.comes, self.comes, self.looks, self.looks, self.looks, self.steps, self.steps),
            *(self.aborts, self.turns_disk, self.time_passes, self.prices_move, self.evicts),
        )
        for _ in range(NUM_EVENTS):
            self.rnd.choice(events)()
        self.disk.set()
        for req in list(self.waiting):
            self.cache.release_aborted_request(req.cache_request_handle)
        self.world.until(lambda: not self.cache.has_loads_under_way)
        assert not self.watch.states() and not self.cache.tiering.planner.loads

    def asks(self, req: Any) -> None:
        self.cache.tiering.loads.comes(req, MAX_ATTEMPTS)
        self.world.asks(req.rid, req.prompt)

    def comes(self) -> None:
        if len(self.waiting) == MAX_WAITING:
            return
        self.num_asked += 1
        tokens = prompt(self.rnd.randrange(NUM_PROMPTS + 1), 3)  # the last one is not stored
        req = SimpleNamespace(
            rid=f"r{self.num_asked}",
            cache_request_handle=CacheRequestHandle(f"r{self.num_asked}", 0),
            prompt=tokens[: self.rnd.randint(1, 3) * PAGE],
            storage_prefetch_retry_attempts=self.rnd.choice([0, 0, MAX_ATTEMPTS]),
        )
        self.asks(req)
        self.waiting.append(req)

    def looks(self) -> None:
        """A pass over the queue, whose front may start."""
        retries = self.cache.storage_prefetch_retries
        for req, _ in retries.pop_ready(self.waiting, 1, MAX_ATTEMPTS):
            req.storage_prefetch_retry_attempts += 1
            self.asks(req)
        for req in self.waiting[: self.rnd.randint(1, MAX_WAITING)]:
            handle = req.cache_request_handle
            if self.cache.check_prefetch_progress(handle) and self.rnd.random() < 0.3:
                self.cache.pop_prefetch_loaded_span(handle)
                self.cache.finish_storage_prefetch_admission(handle, PAGE, None)
                self.waiting.remove(req)

    def steps(self) -> None:
        num_under_way = len(self.cache.ongoing_prefetch)
        self.cache.check_hicache_events()
        if self.disk.is_set() and num_under_way:
            self.world.until(lambda: len(self.cache.ongoing_prefetch) < num_under_way)

    def aborts(self) -> None:
        if self.waiting and self.rnd.random() < 0.5:
            req = self.waiting.pop(self.rnd.randrange(len(self.waiting)))
            self.cache.release_aborted_request(req.cache_request_handle)

    def turns_disk(self) -> None:
        (self.disk.clear if self.disk.is_set() else self.disk.set)()

    def time_passes(self) -> None:
        self.now += self.rnd.choice([0.1, 1.0, 2.0 * PAGE])

    def prices_move(self) -> None:
        price = self.rnd.choice([1.0, 1.0, 1e-9])  # of a token; a load is sooner or later
        self.cache.tiering.planner.costs.prefill = PrefillCost((price, price, 0.0))

    def evicts(self) -> None:
        """Others need host memory, and once in a while that of other components' states."""
        self.cache.evict_host(self.rnd.choice([PAGE, self.world.num_host_tokens]))
        if self.rnd.random() < 0.2:
            self.cache.tiering.loads.unlock_last_loaded()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_loads_change_state_as_the_table_says(
    world: CacheWorld,
    monkeypatch: pytest.MonkeyPatch,
    disk: threading.Event,
    seed: int,
    num_ranks: int,
) -> None:
    world.store(*(prompt(number, 3) for number in range(NUM_PROMPTS)))
    world.cache.tiering.loads._turns = Turns(7 * PAGE)
    requests = RandomRequests(world, disk, seed)
    monkeypatch.setattr(world.cache.tiering.planner.loads, "_clock", lambda: requests.now)
    if num_ranks > 1:
        answers = [SILENT] * 9 + [-2, -1, 0]
        world.has_ranks(monkeypatch, lambda _: requests.rnd.choice(answers))
    requests.run()
    found = {(before, after) for _, before, after in requests.watch.seen}
    assert ("READING", "LANDED") in found and ("LANDED", "GONE") in found
    assert num_ranks == 1 or ("GONE", "ASKED") in found
