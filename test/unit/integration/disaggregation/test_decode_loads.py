"""What decode promises prefill, over SGLang's own tree and queues and a real store."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cache_world import PAGE, CacheWorld, cache_world
from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_tiered.integration.disaggregation import decode_loads
from sglang_tiered.integration.ranks import RankAgreement

SMALL_PAGE = 4  # two of them are less than what SGLang finds worth a copy to the device
TOKENS = array("q", range(20 * PAGE))


class Decode:
    """A decode instance's cache, and its queue of requests that wait for memory."""

    def __init__(self, world: CacheWorld) -> None:
        self.cache = world.cache
        self._world, self.until = world, world.until
        self.queue: Any = DecodePreallocQueue.__new__(DecodePreallocQueue)
        self.queue.tree_cache = self.cache
        self.queue.token_to_kv_pool = world.allocator.get_kvcache()
        self.queue.scheduler = SimpleNamespace(enable_decode_hicache=True)
        self.queue.queue = []
        self.num_requests = 0

    def store(self, tokens: array[int] = TOKENS) -> None:
        self._world.store(tokens)

    def arrives(self, tokens: array[int] = TOKENS) -> DecodeRequest:
        self.num_requests += 1
        sampling = SamplingParams(max_new_tokens=1)
        req = Req(f"r{self.num_requests}", "", tokens[:], sampling)
        entry = DecodeRequest(req=req, kv_receiver=None)
        self.queue.queue.append(entry)
        return entry

    def waits(self, entry: DecodeRequest) -> bool:
        """SGLang's poll finds prefill ready for all of them; what it is made to go on with."""
        self.cache.check_hicache_events()
        for each in self.queue.queue:
            each.waiting_for_input = True
        decode_loads.after_handshakes(None, self.queue)
        return not entry.waiting_for_input

    def promise(self, entry: DecodeRequest) -> int:
        """The tokens that prefill is told not to send."""
        match = self.queue._match_prefix_and_lock(entry.req)
        self.queue._start_hicache_prefetch(entry.req, match)
        decode_loads.after_match(None, self.queue, entry.req, match)
        entry.prefix_match = match
        self.queue.queue.remove(entry)
        decode_loads.after_preallocation(([entry], []), self.queue)
        return int(match.decode_prefix_len)

    def restores(self, entry: DecodeRequest) -> int:
        """How much of the promise gets to the device."""
        req = entry.req
        of_match = {"best_match_node": req.best_match_node, "host_hit_length": req.host_hit_length}
        loaded, _ = self.cache.init_load_back(InitLoadBackParams(req=req, **of_match))
        return int(req.prefix_len + loaded)


@pytest.fixture
def decode(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Decode]:
    with cache_world(
        tmp_path / "kv",
        monkeypatch,
        page_size=getattr(request, "param", PAGE),
        hicache_storage_prefetch_retry_max_attempts=1_000_000,
        disaggregation_mode="decode",
        disaggregation_decode_enable_radix_cache=True,
    ) as world:
        yield Decode(world)


def test_only_pages_in_memory_are_promised(decode: Decode) -> None:
    decode.store()
    entry = decode.arrives()
    assert decode.promise(entry) == 0


@pytest.mark.parametrize(
    ("decode", "num_tokens"),
    [(PAGE, len(TOKENS)), (SMALL_PAGE, 2 * SMALL_PAGE)],
    indirect=["decode"],
)
def test_request_waits_for_its_load_before_promising(decode: Decode, num_tokens: int) -> None:
    tokens = TOKENS[:num_tokens]
    decode.store(tokens)
    entry = decode.arrives(tokens)
    decode.until(lambda: not decode.waits(entry))
    assert decode.promise(entry) == num_tokens
    assert decode.restores(entry) == num_tokens


def test_deferred_load_is_retried_after_rank_agreement(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode.store()
    cache = decode.cache
    # Another rank that always says the same.
    monkeypatch.setattr(cache, "_all_reduce_attn_groups", lambda data, op: None)
    monkeypatch.setattr(cache, "decides_alone", False)
    cache.tiering.loads.agreement = RankAgreement(is_first=True, is_alone=False)
    entry = decode.arrives()
    assert decode.waits(entry)
    decode.until(lambda: not decode.waits(entry))
    assert decode.promise(entry) == len(TOKENS)


def test_requests_that_left_are_no_longer_waited_for(decode: Decode) -> None:
    """Else every load looks free: whoever comes would wait behind all who ever came."""
    decode.store()
    promised, failed = decode.arrives(), decode.arrives()
    decode.until(lambda: not decode.waits(promised))
    assert decode.cache.tiering.planner.queue_wait_s > 0
    decode.promise(promised)
    decode.queue.queue.remove(failed)
    decode_loads.after_preallocation(([], [failed]), decode.queue)
    assert decode.cache.tiering.planner.queue_wait_s == 0
    assert decode.cache.tiering.loads.num_tokens() == 0


def test_promised_copies_stay_locked_until_copied(decode: Decode) -> None:
    decode.store()
    entry = decode.arrives()
    decode.until(lambda: not decode.waits(entry))
    promised = decode.promise(entry)
    cache, transfers = decode.cache, SimpleNamespace(tree_cache=decode.cache, queue=[entry])
    assert cache.evict_host(1 << 20) == 0
    decode_loads.after_transfers(None, transfers)  # still waits
    assert cache.evict_host(1 << 20) == 0
    assert decode.restores(entry) == promised
    entry.hicache_restore_lock = cache.lock(entry.req.best_match_node)
    decode_loads.after_transfers(None, transfers)
    assert not cache.promised
