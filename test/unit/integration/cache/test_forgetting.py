"""No match reaches erased pages and nothing stores them, until a later request computes them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_world import PAGE, CacheWorld, cache_world, hashes_of, prompt
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_tiered.integration.identity.tenants import HiddenPages
from sglang_tiered.storage.base import NO_TENANT, Erasure
from sglang_tiered.storage.promises import all_true, is_true

TOKENS = prompt(1, 6)


@pytest.fixture(params=[False, True], ids=["large", "small"])
def world(open_world: Callable[..., CacheWorld], request: pytest.FixtureRequest) -> CacheWorld:
    """SGLang's tree core, and that of a host tier smaller than device memory."""
    return open_world(is_small=request.param)


def matched(world: CacheWorld, tokens: array[int]) -> int:
    return world.num_in_memory(tokens) // PAGE


def hide(world: CacheWorld, hashes: list[str]) -> None:
    world.cache.hidden_pages.hide(hashes)


def erase_nvme(world: CacheWorld, hashes: list[str]) -> None:
    engine = world.cache.storage.region_engine
    assert engine.erase(Erasure.of(map(bytes.fromhex, hashes))).result(30)


class Turn:
    """What the scheduler does for a request: match, compute, insert."""

    def __init__(self, world: CacheWorld, tokens: array[int]) -> None:
        self.world = world
        self.req = Req("r", "", tokens, SamplingParams(max_new_tokens=1))
        world.admit(self.req, tokens)
        self.num_matched = self.req.prefix_len // PAGE
        world.take_slots(self.req, self.req.kv.kv_allocated_len, len(tokens))

    def end_chunk(self, num_pages: int) -> None:
        self.world.cache.checkpoint(self.req, up_to=num_pages * PAGE)

    def end(self) -> None:
        self.world.end(self.req)
        self.world.wait_for_copies()


def run(world: CacheWorld, tokens: array[int]) -> int:
    """A request from its begin to its end; returns the pages it found on the device."""
    turn = Turn(world, tokens)
    turn.end()
    return turn.num_matched


def settle(world: CacheWorld) -> None:
    world.until(lambda: not world.cache.is_under_way())


def run_and_store(world: CacheWorld, tokens: array[int] = TOKENS) -> None:
    run(world, tokens)
    world.until(lambda: world.num_stored() == len(tokens) // PAGE)
    settle(world)


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


def queued_to_be_stored(world: CacheWorld) -> End:
    """The storage thread comes to it when it is erased."""
    lock = world.cache.storage.gate.lock
    lock.acquire()
    run(world, TOKENS)
    world.until(lambda: world.cache.ongoing_backup)
    return lock.release


def settle_nothing() -> None:
    pass


PLACES = [on_the_device, in_host_memory, on_nvme, queued_to_be_stored]
PLACES += [being_computed, being_loaded]


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
            match = world.match(TOKENS, world.cache.hidden_tenants.key_of(None, None))
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
    branch = TOKENS[: 2 * PAGE] + prompt(2, 2)
    run(world, TOKENS)
    run(world, branch)
    assert matched(world, TOKENS) == 6
    hide(world, hashes_of(TOKENS)[2:4])
    assert matched(world, TOKENS) == 2
    assert matched(world, branch) == 4
    assert matched(world, TOKENS[: 2 * PAGE]) == 2
    hide(world, hashes_of(TOKENS))
    assert matched(world, TOKENS) == 0
    assert Turn(world, TOKENS).num_matched == 0


def test_computed_again_is_found_and_stored_again(world: CacheWorld) -> None:
    run_and_store(world)
    hide(world, hashes_of(TOKENS))
    erase_nvme(world, hashes_of(TOKENS))
    assert world.num_stored() == 0
    assert run(world, TOKENS[: 4 * PAGE]) == 0
    assert matched(world, TOKENS) == 4, "the rest was not computed again"
    world.until(lambda: world.num_stored() == 4)
    assert run(world, TOKENS) == 4
    assert matched(world, TOKENS) == 6
    assert not world.cache.hidden_pages
    world.until(lambda: world.num_stored() == 6)


def test_hidden_pages_are_neither_copied_nor_stored(world: CacheWorld) -> None:
    hide(world, hashes_of(TOKENS))
    world.compute(TOKENS)  # by nobody who could have seen that
    settle(world)
    assert matched(world, TOKENS) == 0
    assert world.num_stored() == 0
    host = world.cache.cache_controller.mem_pool_host
    assert host.available_size() == host.logical_size


def test_nothing_hidden_is_loaded(world: CacheWorld) -> None:
    world.store(TOKENS)
    hide(world, hashes_of(TOKENS)[2:])
    request = world.asks("r", TOKENS)
    world.until(lambda: world.cache.check_prefetch_progress(request))
    assert matched(world, TOKENS) == 2
    host = world.cache.cache_controller.mem_pool_host
    assert host.logical_size - host.available_size() == 2 * PAGE, "what nobody may use was loaded"


def test_stored_end_hides_no_gap_before_it(world: CacheWorld) -> None:
    """The middle of a conversation was forgotten; what NVMe keeps behind it serves nobody."""
    run_and_store(world)
    middle = hashes_of(TOKENS)[2:4]
    hide(world, middle)
    erase_nvme(world, middle)
    assert run(world, TOKENS) == 2
    world.until(lambda: world.cache.storage.num_kept(hashes_of(TOKENS)) == 6)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_others_erased_no_step_matches(
    open_world: Callable[..., CacheWorld],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
) -> None:
    """They believe it to be gone once they have told of it; several ranks asked for too long."""
    world = open_world(bucket=tmp_path / "bucket")
    cache = world.cache
    monkeypatch.setattr(cache, "hide_heard", lambda erasures: list(map(cache.hide, erasures)))
    if num_ranks > 1:
        world.has_ranks(monkeypatch)
    for number in range(4):  # heard after an odd number of steps, and an even one
        run(world, TOKENS)
        run(world, tokens := prompt(number + 10, 2))
        keys = tuple(map(bytes.fromhex, hashes_of(tokens)))
        assert matched(world, tokens) == 2
        cache.storage.remote_erasures(Erasure.of(keys, spread=False))
        cache.check_hicache_events()
        assert matched(world, tokens) == 0 and matched(world, TOKENS) == 6
        if number % 2:
            cache.check_hicache_events()


def test_promised_prefix_serves_its_request(world: CacheWorld) -> None:
    run(world, TOKENS)
    req = Req("d", "", TOKENS, SamplingParams(max_new_tokens=1))
    match = world.match(TOKENS, req=req)
    world.cache.promised.lock(req.cache_request_handle, match.best_match_node)
    hide(world, hashes_of(TOKENS))
    assert world.match(TOKENS, req=req).device_prefix_len == 6 * PAGE
    world.cache.promised.unlock_all_but()
    assert world.match(TOKENS, req=req).device_prefix_len == 0


def test_last_page_of_bigrams_is_hidden(open_world: Callable[..., CacheWorld]) -> None:
    """A page of pairs needs one token more than it has pairs."""
    world, tokens = open_world(is_eagle=True), array("q", [*TOKENS, 7])
    hashes = hashes_of(tokens, is_bigram=True)
    run_and_store(world, tokens)
    assert matched(world, tokens) == len(hashes) == 6
    hide(world, hashes[5:])
    assert matched(world, tokens) == 5
    erase_nvme(world, hashes[5:])
    assert run(world, tokens) == 5
    assert matched(world, tokens) == 6
    world.until(lambda: world.num_stored() == 6)
    hide(world, hashes[5:])
    key = RadixKey(tokens, None)
    assert world.cache.has_hidden(key) and not world.cache.has_hidden(key[: 5 * PAGE])


def test_news_after_a_purge_hide_their_pages(world: CacheWorld) -> None:
    """A request goes by a marked key then, and its pages by the hashes that others know."""
    cache = world.cache
    cache.hidden_tenants.quarantine(None)
    key = RadixKey(TOKENS, cache.hidden_tenants.key_of(None, None))
    cache.insert(InsertParams(key=key, value=world.alloc(len(TOKENS))))
    assert cache.match_visible(key).device_prefix_len == len(TOKENS)
    hide(world, hashes_of(TOKENS)[2:])
    assert cache.match_visible(key).device_prefix_len == 2 * PAGE


def test_page_hidden_twice_needs_a_later_request() -> None:
    pages = HiddenPages()
    pages.hide(["a"])
    seen = pages.version
    pages.hide(["a"])
    assert pages.computed(["a", "b"], seen, is_behind=False) == (False, True)
    assert pages.computed(["c"], seen, is_behind=True) == (False, True)
    assert "a" in pages and "b" in pages and "c" in pages, "found behind a page from before"
    assert pages.computed(["a", "b", "c"], pages.version, is_behind=False) == (True, False)
    assert not pages


def test_pipeline_stores_what_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree believes that NVMe has them, and its stages plan no stores."""
    with cache_world(tmp_path / "kv", monkeypatch) as world:
        world.cache.tiering = None
        run(world, TOKENS)
        world.until(lambda: world.num_stored() == 6 and not world.cache.is_under_way())
        hashes = hashes_of(TOKENS)
        world.cache.hidden_pages.hide(hashes)
        erased = Erasure.of(map(bytes.fromhex, hashes))
        assert world.cache.storage.region_engine.erase(erased).result(30)
        assert run(world, TOKENS) == 0
        world.until(lambda: world.num_stored() == 6)
