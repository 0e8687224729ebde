"""A server that is never idle: what was hidden stays hidden, and the tiers serve everybody else."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from cache_world import PAGE, CacheWorld, hashes_of, prompt
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import (
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_tiered.integration.admin.control import Control, hide_memory
from sglang_tiered.integration.admin.service import CONTROL_PREFIX

PAGES = 6


class BusyServer:
    """Has requests under way all the time; its pages say which weights computed them."""

    def __init__(self, world: CacheWorld) -> None:
        self.world, self.cache = world, world.cache
        self.weights = 1
        self.control = Control()
        self.waiting: list[Any] = []
        self.scheduler: Any = SimpleNamespace(
            tree_cache=self.cache,
            waiting_queue=self.waiting,
            grammar_manager=SimpleNamespace(grammar_queue=[]),
            is_fully_idle=lambda: False,
            disaggregation_mode=DisaggregationMode.NULL,
        )
        self.control.attach(self.scheduler)
        self.num_asked = 0

    def key(self, tokens: array[int], extra_key: str | None = None) -> RadixKey:
        """The key of a request that comes now."""
        key_of = self.cache.hidden_tenants.key_of
        is_eagle = self.cache.tree_core.is_eagle
        return RadixKey(tokens[:], key_of(extra_key, None), is_bigram=is_eagle)

    def compute(self, key: RadixKey) -> None:
        """A request computes a prompt with the weights of now, and puts it into the tree."""
        num_tokens = len(key) // PAGE * PAGE
        slots = self.world.alloc(num_tokens)
        pool = self.world.allocator.get_kvcache()
        for layer in range(2):
            for buffer in pool.get_kv_buffer(layer):
                buffer[slots] = float(self.weights)
        self.cache.insert(InsertParams(key=key[:num_tokens], value=slots))
        self.world.wait_for_copies()

    def transfer(self, tokens: array[int]) -> Req:
        """KV arrives for a request of a decode server, which waits with it for its batch."""
        req = Req("transferred", "", tokens[:], SamplingParams(max_new_tokens=1))
        self.world.admit(req, tokens)
        self.world.take_slots(req, 0, len(tokens))
        self.waiting.append(req)
        return req

    def is_stored(self, tokens: array[int], extra_key: str | None = None) -> bool:
        """Whether NVMe has a prompt, by the name that every server gives it."""
        hashes = hashes_of(tokens, extra_key, is_bigram=self.cache.tree_core.is_eagle)
        return bool(self.cache.storage.lookup_leading(hashes) == len(hashes))

    def store(self, tokens: array[int], extra_key: str | None = None) -> None:
        self.compute(self.key(tokens, extra_key))
        self.world.until(lambda: self.is_stored(tokens, extra_key))
        self.world.until(lambda: not self.cache.ongoing_backup)

    def num_found(self, tokens: array[int], extra_key: str | None = None) -> int:
        """The tokens that memory has for a request that comes now."""
        match = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens, extra_key)))
        return int(match.device_prefix_len + match.host_hit_length)

    def loads(self, tokens: array[int], extra_key: str | None = None) -> int:
        """A request comes; returns the tokens that a tier brought for it."""
        self.num_asked += 1
        before = self.num_found(tokens, extra_key)
        name, key = f"busy {self.num_asked}", self.key(tokens, extra_key)
        request = self.world.asks(name, tokens, key)
        self.world.until(lambda: self.cache.check_prefetch_progress(request))
        return self.num_found(tokens, extra_key) - before

    def loaded_weights(self, tokens: array[int]) -> set[float]:
        """By which weights the host pages of a prompt were computed, which NVMe brought."""
        match = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens)))
        node, core = match.best_match_node, self.cache.tree_core
        found: set[float] = set()
        for part in core.collect_path_info([node])[0]:
            spec = core.build_storage_backup_spec(part.node_id, False)
            assert spec is not None
            pages = self.cache.cache_controller.mem_pool_host.anchor_entry.host_pool
            for slot in spec.host_value[::PAGE].tolist():
                found.update(pages.get_data_page(slot).flatten().unique().tolist())
        return found

    def purge_all(self) -> None:
        self.control._answer(f"{CONTROL_PREFIX}purge", {"id": "1", "all": True})

    def change_weights(self) -> None:
        """As after an update whose flush was refused."""
        self.weights += 1
        hide_memory(self.scheduler)
        self.cache.change_weights(tree_is_empty=True)


@pytest.fixture(params=[None, "has_window", "is_small", "is_eagle"])
def busy(request: pytest.FixtureRequest, open_world: Callable[..., CacheWorld]) -> BusyServer:
    kind = request.param
    return BusyServer(open_world(**({kind: True} if kind else {})))


def test_names_of_pages_stay_bounded(busy: BusyServer) -> None:
    core = busy.cache.tree_core
    if not hasattr(core, "max_names"):
        pytest.skip("this core hashes in Python, and names nothing")
    core.max_names = 8
    hide_memory(busy.scheduler)
    for number in range(1, 4):
        busy.compute(busy.key(prompt(number, PAGES)))
    assert len(core._names) == 8
    busy.store(prompt(3, PAGES))
    assert busy.is_stored(prompt(3, PAGES)), "the last prompt has its names"


def test_a_busy_server_stores_after_a_purge(busy: BusyServer) -> None:
    busy.store(prompt(1, PAGES))
    busy.purge_all()
    assert busy.num_found(prompt(1, PAGES)) == busy.loads(prompt(1, PAGES)) == 0
    tokens = prompt(2, PAGES)
    busy.store(tokens)
    assert not busy.is_stored(prompt(1, PAGES))
    busy.cache.reset()
    busy.world.allocator.clear()
    busy.cache.hidden_tenants.release_all()
    assert busy.loads(tokens) > 0, "found by its plain name, as after a restart"


def test_no_kv_of_old_weights_is_stored(busy: BusyServer) -> None:
    """Its pages have the hashes of the new ones."""
    tokens = prompt(1, PAGES)
    old = busy.key(tokens)
    busy.store(tokens)
    busy.change_weights()
    assert busy.num_found(tokens) == busy.loads(tokens) == 0
    busy.compute(old)  # a request from before ends
    for _ in range(20):
        busy.cache.check_hicache_events()
    assert not busy.is_stored(tokens)
    busy.store(tokens)
    hide_memory(busy.scheduler)
    assert busy.loads(tokens) > 0
    assert busy.loaded_weights(tokens) == {2.0}


def test_kv_of_waiting_requests_stays_hidden(busy: BusyServer) -> None:
    """As on a decode server, whose requests wait with what prefill sent."""
    tokens = prompt(1, PAGES)
    req = busy.transfer(tokens)
    busy.change_weights()
    busy.world.end(req)
    busy.world.wait_for_copies()
    for _ in range(20):
        busy.cache.check_hicache_events()
    assert busy.num_found(tokens) == 0
    assert not busy.is_stored(tokens)


def test_stores_queued_before_are_refused(busy: BusyServer) -> None:
    """The same pages are announced again, by the same hashes, before the thread comes to them."""
    storage, tokens = busy.cache.storage, prompt(1, PAGES)
    storage.gate.lock.acquire()
    try:
        busy.compute(busy.key(tokens))
        for _ in range(20):
            busy.cache.check_hicache_events()
        queued = list(busy.cache.ongoing_backup)
        assert queued
        busy.change_weights()
        busy.compute(busy.key(tokens))
        busy.cache.check_hicache_events()
    finally:
        storage.gate.lock.release()
    busy.world.until(lambda: not busy.cache.ongoing_backup)
    busy.world.until(lambda: busy.is_stored(tokens))
    hide_memory(busy.scheduler)
    assert busy.loads(tokens) > 0
    assert busy.loaded_weights(tokens) == {2.0}
