"""Which loads begin and which requests wait for one, over SGLang's own tree and a real store."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache_world import PAGE, CacheWorld, prompt
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_tiered.integration.cache.load_scheduler import (
    ABSENT,
    DECLINED,
    MAX_ASKS_PER_STEP,
    told_end,
)
from sglang_tiered.integration.cache.loads import Turns
from sglang_tiered.integration.hooks import Hooks
from sglang_tiered.policy.cost_model import LoadDecision, LoadPlan

RETURNING, SHORT, COLD = prompt(1, 16), prompt(2, 1), prompt(3, 4)


@pytest.fixture
def world(world: CacheWorld) -> CacheWorld:
    """A window of 4 pages, and NVMe that holds two prompts, one of them longer than the window."""
    world.store(RETURNING, SHORT)
    world.cache.tiering.loads._turns = Turns(4 * PAGE)
    return world


@pytest.fixture
def windowed(open_world: Callable[..., CacheWorld]) -> CacheWorld:
    """Of a model with sliding windows; NVMe holds a prompt."""
    world = open_world(has_window=True)
    world.store(RETURNING)
    return world


def operation_of(world: CacheWorld) -> Any:
    """The load of the returning prompt."""
    return world.cache.ongoing_prefetch[world.asks("r", RETURNING)].operation


def overfill(world: CacheWorld) -> None:
    """A load longer than the window is begun, once the ranks have agreed on it."""
    returning = world.asks("returning", RETURNING)
    world.cache.check_hicache_events()
    assert not world.cache.load_has_ended(returning) and world.is_retried(returning)
    world.asks("returning", RETURNING)
    assert returning in world.cache.ongoing_prefetch


def put_off(world: CacheWorld, name: str) -> Any:
    """A request whose load finds the window full, on all ranks."""
    world.asks(name, SHORT)
    world.cache.check_hicache_events()
    request = world.asks(name, SHORT)
    assert world.cache.tiering.planner.loads.get(request).num_put_off == PAGE
    return request


@pytest.mark.parametrize("num_put_off", [0, MAX_ASKS_PER_STEP])
def test_cold_request_waits_for_no_load_of_others(
    world: CacheWorld, monkeypatch: pytest.MonkeyPatch, num_put_off: int
) -> None:
    """Which leaves no room to others, or waits for room itself."""
    world.has_ranks(monkeypatch)
    overfill(world)
    waiting = [put_off(world, f"r{number}") for number in range(num_put_off)]
    cold = world.asks("cold", COLD)
    world.cache.check_hicache_events()
    assert not any(world.cache.load_has_ended(request) for request in [*waiting, cold])
    assert world.is_retried(cold)
    assert world.cache.load_has_ended(world.asks("cold", COLD))


@pytest.mark.parametrize("whose", ["this rank", "another rank"])
def test_load_useless_to_one_rank_all_drop(
    world: CacheWorld, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    gains = {"this rank": True, "another rank": True}
    world.has_ranks(monkeypatch, lambda question: 1 << 40 if gains["another rank"] else 0)
    planner = world.cache.tiering.planner
    monkeypatch.setattr(planner, "gains_by_its_turn", lambda *_, **__: gains["this rank"])
    overfill(world)
    request = put_off(world, "late")

    def waits() -> bool:
        """In a step of its own, as the ranks answer each other from one to the next."""
        world.cache.check_hicache_events()
        return not world.cache.load_has_ended(request)

    assert all(waits() for _ in range(4))
    gains[whose] = False
    num_steps = 0
    while waits():
        num_steps += 1
        assert num_steps <= 3


@pytest.mark.parametrize(("end", "num_loaded"), [(DECLINED, 0), (ABSENT, 0), (3 * PAGE, 3 * PAGE)])
def test_figures_are_of_what_all_ranks_load(
    world: CacheWorld, monkeypatch: pytest.MonkeyPatch, end: int, num_loaded: int
) -> None:
    """This one alone would load all: routers would be told that nothing waits to be computed."""
    world.has_ranks(monkeypatch, lambda question: end if end < 0 else told_end(end))
    world.asks("r", RETURNING)
    world.cache.check_hicache_events()
    request, planner = world.asks("r", RETURNING), world.cache.tiering.planner
    assert (request in world.cache.ongoing_prefetch) == (num_loaded > 0)
    assert planner.num_waiting_tokens == len(RETURNING) + 1 - num_loaded
    assert planner.tokens[LoadDecision.LOAD] == num_loaded
    world.cache.tiering.loads.leaves(request)
    assert planner.tokens[LoadDecision.DECLINED] == len(RETURNING) - num_loaded
    assert not planner.num_waiting_tokens and not any(planner._loading)


def test_overridden_embeddings_load_no_prefix(world: CacheWorld) -> None:
    """SGLang would load all of it, have the request wait, and then match nothing."""
    scheduler: Any = SimpleNamespace(
        tree_cache=world.cache,
        enable_hicache_storage=True,
        enable_lmcache=False,
        waiting_queue=[],
        running_batch=SimpleNamespace(reqs=[]),
    )
    overrides = PositionalEmbeds(torch.zeros(1, 8), [0])
    req = Req("r", "", RETURNING[:], SamplingParams(), positional_embed_overrides=overrides)
    handle = req.cache_request_handle
    ask = inspect.unwrap(Scheduler._prefetch_kvcache)  # the hook may be there already
    ask(scheduler, req)
    assert list(world.cache.ongoing_prefetch) == [handle], "SGLang no more loads it"
    world.cache.release_aborted_request(handle)
    Hooks(on_cpu=True).around_prefetch(ask, scheduler, req)
    assert not world.cache.ongoing_prefetch and not world.cache.tiering.planner.loads
    assert world.cache.load_has_ended(handle)


def test_load_that_prices_left_behind_is_followed(
    world: CacheWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This rank has answered, and all begin it; else its waits and its reads had no bound here."""
    world.has_ranks(monkeypatch)
    world.asks("r", SHORT)
    world.cache.check_hicache_events()
    planner = world.cache.tiering.planner
    monkeypatch.setattr(planner.costs, "plan", lambda **_: LoadPlan((), 0.0, 0.0))
    request = world.asks("r", SHORT)
    assert request in world.cache.ongoing_prefetch
    assert planner.loads.get(request).load.plan.load_s > 0.0


@pytest.mark.parametrize(("has_window", "num_saved", "num_before"), [(False, 4, 12), (True, 16, 0)])
def test_request_weighs_all_that_it_would_lose(
    open_world: Callable[..., CacheWorld],
    monkeypatch: pytest.MonkeyPatch,
    has_window: bool,
    num_saved: int,
    num_before: int,
) -> None:
    """With sliding windows SGLang drops a load of which anything is missing."""
    world = open_world(has_window=has_window)
    world.store(RETURNING)
    operation = operation_of(world)
    operation.completed_tokens = 12 * PAGE
    weighed: dict[str, Any] = {}
    costs = world.cache.tiering.planner.costs
    monkeypatch.setattr(costs, "should_wait", lambda **asked: weighed.update(asked) or True)
    assert not world.cache._prefetch_deadline_expired(operation)
    assert weighed["num_saved"] == num_saved * PAGE
    assert weighed["num_before"] == num_before * PAGE


def test_request_without_its_window_waits_not_for_ever(
    windowed: CacheWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its KV is there, and a read of the window hangs."""
    operation = operation_of(windowed)
    operation.completed_tokens = len(RETURNING)
    now = [0.0]
    monkeypatch.setattr(windowed.cache.tiering.planner, "_clock", lambda: now[0])
    assert not windowed.cache._prefetch_deadline_expired(operation)
    now[0] += 2 * len(RETURNING)  # computing takes a second per token
    assert windowed.cache._prefetch_deadline_expired(operation)
    planner = windowed.cache.tiering.planner
    assert planner.tokens[LoadDecision.GAVE_UP] == len(RETURNING)


def test_constant_deadline_ends_no_load_that_pays(
    world: CacheWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It bounds those that are waited for at any price."""
    world.store(RETURNING)
    operation = operation_of(world)
    operation.completed_tokens = 0
    over = UnifiedRadixCache, "_prefetch_deadline_expired", lambda *_: True
    monkeypatch.setattr(*over)
    assert not world.cache._prefetch_deadline_expired(operation)
    monkeypatch.setattr(world.cache.tiering.planner, "always", True)
    assert world.cache._prefetch_deadline_expired(operation)


@pytest.fixture
def loaded(world: CacheWorld) -> Any:
    """A request whose load has ended, and whose turn to be admitted has not come."""
    request = world.asks("returning", RETURNING)
    world.until(lambda: request not in world.cache.ongoing_prefetch)
    return request


def host_hit(world: CacheWorld) -> int:
    """What of the returning prompt is in host memory, once all that may go has gone."""
    world.cache.evict_host(world.num_host_tokens)
    return int(world.match(RETURNING).host_hit_length)


def test_loaded_prefix_stays_until_its_request_is_admitted(world: CacheWorld, loaded: Any) -> None:
    assert world.cache.cache_controller.prefetch_tokens_occupied == 0
    assert host_hit(world) == len(RETURNING)
    # The scheduler looks at the request, and device memory is too full for it.
    assert world.cache.load_has_ended(loaded)
    assert world.cache.pop_prefetch_loaded_span(loaded)[0] == len(RETURNING)
    assert host_hit(world) == len(RETURNING)
    assert world.cache.tiering.loads.num_tokens() == len(RETURNING)
    world.cache.finish_storage_prefetch_admission(loaded, len(RETURNING), reason=None)
    assert host_hit(world) == 0
    assert world.cache.tiering.loads.num_tokens() == 0


def test_flush_leaves_nothing_loaded_locked(world: CacheWorld, loaded: Any) -> None:
    assert host_hit(world) == len(RETURNING)
    world.cache.reset()
    assert host_hit(world) == 0 and world.cache.tiering.loads.num_tokens() == 0
    assert not world.cache.tiering.loads.unlock_last_loaded()


def test_load_without_a_request_stays_evictable(world: CacheWorld) -> None:
    warming = world.asks("warming", RETURNING)
    world.cache.tiering.loads.drop(warming)
    world.until(lambda: warming not in world.cache.ongoing_prefetch)
    assert host_hit(world) == 0


@pytest.mark.parametrize("what", ["loaded", "resident"])
def test_what_is_kept_gives_way_to_windows(windowed: CacheWorld, what: str) -> None:
    """Else a long queue would leave none of them for new copies; and of a load all is lost without
    its window."""
    cache = windowed.cache
    if what == "loaded":
        request = windowed.asks("returning", RETURNING)
        windowed.until(lambda: request not in cache.ongoing_prefetch)
    else:
        windowed.compute(RETURNING)
        windowed.until(lambda: not cache.ongoing_backup)
        cache.evict(EvictParams(num_tokens=len(RETURNING)))
        assert cache.tiering.residents.num_tokens > 0
    windows = cache.components[ComponentType.SWA]
    free_tokens = windows._swa_kv_pool_host.available_size()
    assert windows.alloc_prefetch_staging(free_tokens + PAGE) is not None
    assert host_hit(windowed) == 0
