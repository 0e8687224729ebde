"""Erased pages in SGLang's own tree, over a real store: no match reaches them and nothing stores
them, until a request that began later computes them again."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from cache_world import PAGE, CacheWorld, cache_world, prompt
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_tiered.integration.identity.hidden_pages import HiddenPages
from sglang_tiered.storage.base import NO_TENANT, Erasure
from sglang_tiered.storage.promises import all_true, is_true

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKENS = prompt(1, 6)


@pytest.fixture(params=[False, True], ids=["large", "small"])
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[CacheWorld]:
    """SGLang's tree core, and that of a host tier smaller than device memory."""
    with cache_world(tmp_path / "kv", monkeypatch, is_small=request.param) as world:
        yield world


def hashes_of(tokens: array[int], *, is_bigram: bool = False) -> list[str]:
    key = RadixKey(tokens, None, is_bigram=is_bigram).page_aligned(PAGE)
    hashes: list[str] = get_storage_hash_str(key, None, page_size=PAGE)
    return hashes


def matched(world: CacheWorld, tokens: array[int]) -> int:
    match = world.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None)))
    return int(match.device_prefix_len + match.host_hit_length) // PAGE


class Turn:
    """What the scheduler does for a request: match, compute, insert."""

    def __init__(self, world: CacheWorld, tokens: array[int]) -> None:
        self.world, self.cache = world, world.cache
        self.req = req = Req("r", "", tokens, SamplingParams(max_new_tokens=1))
        req.refresh_fill_ids()
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None), req=req))
        req.last_node, req.prefix_len = match.last_device_node, match.device_prefix_len
        self.num_matched = match.device_prefix_len // PAGE
        req.lock = self.cache.lock(req.last_node)
        pool = self.cache.req_to_token_pool
        pool.alloc([req])
        held = self.cache.path_device_indices(req.last_node)
        row = pool.req_to_token[req.kv.req_pool_idx]
        row[: len(held)] = held
        req.kv.cache_protected_len = len(held)
        num_slots = -(-(len(tokens) - len(held)) // PAGE) * PAGE
        row[len(held) : len(tokens)] = world.alloc(num_slots)[: len(tokens) - len(held)]
        req.kv.kv_allocated_len = req.kv.kv_committed_len = len(tokens)

    def end_chunk(self, num_pages: int) -> None:
        self.cache.checkpoint(self.req, up_to=num_pages * PAGE)

    def end(self) -> None:
        self.req.finished_reason, self.req.finished_len = FINISH_LENGTH(length=0), 0
        release_kv_cache(self.req, self.cache, checkpoint=True)
        self.world.wait_for_copies()


def run(world: CacheWorld, tokens: array[int]) -> int:
    """A request from its begin to its end; returns the pages it found on the device."""
    turn = Turn(world, tokens)
    turn.end()
    return turn.num_matched


def settle(world: CacheWorld) -> None:
    world.until(lambda: not world.cache.is_under_way())


# ---- The erase table: what is selected x where its pages are ----

SELECTORS = {
    "pages": Erasure.of(map(bytes.fromhex, hashes_of(TOKENS + prompt(3, 2)))),
    "tenant": Erasure(tenant=NO_TENANT),
    "everything": Erasure(),
}
End = Callable[[], object]


def on_the_device(world: CacheWorld) -> End:
    run(world, TOKENS)
    return settle_nothing


def in_host_memory(world: CacheWorld) -> End:
    run(world, TOKENS)
    settle(world)
    world.cache.evict(EvictParams(num_tokens=len(TOKENS)))
    return settle_nothing


def on_nvme(world: CacheWorld) -> End:
    world.store(TOKENS)
    return settle_nothing


def being_computed(world: CacheWorld) -> End:
    turn = Turn(world, TOKENS + prompt(3, 2))
    turn.end_chunk(4)

    def end() -> None:
        turn.end_chunk(7)
        turn.end()

    return end


def being_loaded(world: CacheWorld) -> End:
    world.store(TOKENS)
    request = world.asks("r", TOKENS)
    assert request in world.cache.ongoing_prefetch
    return lambda: world.until(lambda: world.cache.check_prefetch_progress(request))


def settle_nothing() -> None:
    pass


PLACES = [on_the_device, in_host_memory, on_nvme, being_computed, being_loaded]


@pytest.mark.parametrize("what", SELECTORS.values(), ids=SELECTORS)
@pytest.mark.parametrize("place", PLACES)
def test_nothing_erased_is_found_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: Erasure,
    place: Callable[[CacheWorld], End],
) -> None:
    with cache_world(tmp_path / "kv", monkeypatch) as world:
        end = place(world)
        durable = all_true(world.cache.erase(what))

        def is_found() -> bool:
            key = RadixKey(TOKENS, world.cache.hidden_tenants.key_of(None, None))
            match = world.cache.match_prefix(MatchPrefixParams(key=key))
            return bool(match.device_prefix_len or match.host_hit_length)

        assert not is_found()
        end()
        settle(world)
        assert is_true(durable, 30.0)
        assert not is_found()
        assert world.num_stored() == 0
    with cache_world(tmp_path / "kv", monkeypatch) as world:
        request = world.asks("r", TOKENS)
        world.until(lambda: world.cache.check_prefetch_progress(request))
        assert matched(world, TOKENS) == 0
        assert run(world, TOKENS) == 0
        assert matched(world, TOKENS) == 6


def test_match_ends_before_a_hidden_page(world: CacheWorld) -> None:
    run(world, TOKENS)
    assert matched(world, TOKENS) == 6
    world.cache.hidden_pages.hide(hashes_of(TOKENS)[2:4])
    assert matched(world, TOKENS) == 2
    assert matched(world, TOKENS[: 2 * PAGE]) == 2
    world.cache.hidden_pages.hide(hashes_of(TOKENS))
    assert matched(world, TOKENS) == 0
    assert Turn(world, TOKENS).num_matched == 0


def test_pages_of_other_prompts_stay_found(world: CacheWorld) -> None:
    branch = TOKENS[: 2 * PAGE] + prompt(2, 2)
    run(world, TOKENS)
    run(world, branch)
    world.cache.hidden_pages.hide(hashes_of(TOKENS)[2:])
    assert matched(world, branch) == 4
    assert matched(world, TOKENS) == 2


def test_computed_again_is_found_and_stored_again(world: CacheWorld) -> None:
    run(world, TOKENS)
    world.until(lambda: world.num_stored() == 6)
    settle(world)
    hashes = hashes_of(TOKENS)
    cache = world.cache
    cache.hidden_pages.hide(hashes)
    assert cache.storage.region_engine.erase(Erasure.of(map(bytes.fromhex, hashes))).result(30)
    assert world.num_stored() == 0
    assert run(world, TOKENS[: 4 * PAGE]) == 0
    assert matched(world, TOKENS) == 4, "the rest was not computed again"
    world.until(lambda: world.num_stored() == 4)
    assert run(world, TOKENS) == 4
    assert matched(world, TOKENS) == 6
    assert not cache.hidden_pages
    world.until(lambda: world.num_stored() == 6)


def test_hidden_pages_are_neither_copied_nor_stored(world: CacheWorld) -> None:
    world.cache.hidden_pages.hide(hashes_of(TOKENS))
    world.compute(TOKENS)  # by nobody who could have seen that
    settle(world)
    assert matched(world, TOKENS) == 0
    assert world.num_stored() == 0
    host = world.cache.cache_controller.mem_pool_host
    assert host.available_size() == host.logical_size


def test_queued_store_of_a_hidden_page_is_dropped(world: CacheWorld) -> None:
    gate, hashes = world.cache.storage.gate, hashes_of(TOKENS)
    queued = gate.queue_store(hashes, num_tokens=len(TOKENS))
    world.cache.hidden_pages.hide(hashes[3:])
    assert gate.num_admitted(queued, hashes) == 3


def test_nothing_hidden_is_loaded(world: CacheWorld) -> None:
    world.store(TOKENS)
    world.cache.hidden_pages.hide(hashes_of(TOKENS)[2:])
    request = world.asks("r", TOKENS)
    world.until(lambda: world.cache.check_prefetch_progress(request))
    assert matched(world, TOKENS) == 2
    host = world.cache.cache_controller.mem_pool_host
    assert host.logical_size - host.available_size() == 2 * PAGE, "what nobody may use was loaded"


def test_offered_node_with_a_hidden_page_stays(
    world: CacheWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint offers what NVMe lacks."""
    cache = world.cache
    run(world, TOKENS)
    world.until(lambda: world.num_stored() == 6)
    settle(world)
    match = cache.match_prefix(MatchPrefixParams(key=RadixKey(TOKENS, None)))
    (path,) = cache.tree_core.collect_path_info([match.best_match_node])
    hashes = hashes_of(TOKENS)
    cache.hidden_pages.hide(hashes[5:])
    cache.storage.region_engine.erase(Erasure.of(map(bytes.fromhex, hashes))).result(30)
    begun: list[int] = []
    monkeypatch.setattr(cache, "begin_store", lambda node_id, _: begun.append(node_id))
    cache.tiering.store_soon(path)
    world.until(lambda: not cache.tiering.stores.queue)
    assert not begun


def test_stored_end_hides_no_gap_before_it(world: CacheWorld) -> None:
    """The middle of a conversation was forgotten; what NVMe keeps behind it serves nobody."""
    run(world, TOKENS)
    world.until(lambda: world.num_stored() == 6)
    settle(world)
    middle = hashes_of(TOKENS)[2:4]
    world.cache.hidden_pages.hide(middle)
    world.cache.storage.region_engine.erase(Erasure.of(map(bytes.fromhex, middle))).result(30)
    assert run(world, TOKENS) == 2
    world.until(lambda: world.cache.storage.num_kept(hashes_of(TOKENS)) == 6)


def test_promised_prefix_serves_its_request(world: CacheWorld) -> None:
    run(world, TOKENS)
    req = Req("d", "", TOKENS, SamplingParams(max_new_tokens=1))
    params = MatchPrefixParams(key=RadixKey(TOKENS, None), req=req)
    match = world.cache.match_prefix(params)
    world.cache.promised.lock(req.cache_request_handle, match.best_match_node)
    world.cache.hidden_pages.hide(hashes_of(TOKENS))
    assert world.cache.match_prefix(params).device_prefix_len == 6 * PAGE
    world.cache.promised.unlock_all_but()
    assert world.cache.match_prefix(params).device_prefix_len == 0


def test_last_page_of_bigrams_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of pairs needs one token more than it has pairs."""
    with cache_world(tmp_path / "kv", monkeypatch, is_eagle=True) as world:
        tokens = array("q", [*TOKENS, 7])
        hashes = hashes_of(tokens, is_bigram=True)
        assert run(world, tokens) == 0
        assert matched(world, tokens) == len(hashes) == 6
        world.until(lambda: world.num_stored() == 6)
        settle(world)
        world.cache.hidden_pages.hide(hashes[5:])
        assert matched(world, tokens) == 5
        world.cache.storage.region_engine.erase(Erasure.of(map(bytes.fromhex, hashes[5:]))).result(
            30
        )
        assert run(world, tokens) == 5
        assert matched(world, tokens) == 6
        world.until(lambda: world.num_stored() == 6)
        world.cache.hidden_pages.hide(hashes[5:])
        key = RadixKey(tokens, None)
        assert world.cache.has_hidden(key) and not world.cache.has_hidden(key[: 5 * PAGE])


def test_emptied_tree_hides_nothing(world: CacheWorld) -> None:
    run(world, TOKENS)
    settle(world)
    world.cache.hidden_pages.hide(hashes_of(TOKENS))
    world.cache.reset()
    world.allocator.clear()
    assert not world.cache.hidden_pages
    assert run(world, TOKENS) == 0
    assert matched(world, TOKENS) == 6


def test_news_after_a_purge_hide_their_pages(world: CacheWorld) -> None:
    """A request goes by a marked key then, and its pages by the hashes that others know."""
    cache = world.cache
    cache.hidden_tenants.quarantine(None)
    key = RadixKey(TOKENS, cache.hidden_tenants.key_of(None, None))
    cache.insert(InsertParams(key=key, value=world.alloc(len(TOKENS))))
    assert cache.match_visible(key).device_prefix_len == len(TOKENS)
    cache.hidden_pages.hide(hashes_of(TOKENS)[2:])
    assert cache.match_visible(key).device_prefix_len == 2 * PAGE


def test_page_hidden_twice_needs_a_later_request() -> None:
    pages = HiddenPages()
    pages.hide(["a"])
    seen = pages.version
    pages.hide(["a"])
    assert pages.computed(["a"], seen, is_behind=False) == (False, True)
    assert "a" in pages
    assert pages.computed(["a", "b"], pages.version, is_behind=False) == (True, False)
    assert not pages
