"""Hints over SGLang's own tree and a real store: what they bring, and what ends them."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from cache_world import PAGE, CacheWorld, hashes_of, prompt
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

from kit.clock import Clock
from sglang_tiered.integration.admin import calls
from sglang_tiered.integration.admin.calls import Calls
from sglang_tiered.integration.admin.control import Control
from sglang_tiered.integration.admin.conversation_calls import prefetch
from sglang_tiered.integration.cache import hints as module
from sglang_tiered.integration.cache import quiescing
from sglang_tiered.integration.cache.declined_loads import DECLINED, told_end
from sglang_tiered.integration.cache.hints import Chain, Hints, PieceOutcome
from sglang_tiered.integration.ranks import SILENT
from sglang_tiered.policy.hints import LIFE_S, HintEnd
from sglang_tiered.policy.prefetch import PrefetchWindow
from sglang_tiered.storage.base import Erasure

LONG, SHORT = prompt(1, 60), prompt(2, 4)
DONE = {"done": True, "num_tokens": len(LONG), "num_in_memory": len(LONG), "num_loading": 0}


class HintWorld:
    """A cache whose store holds two prompts, and what ``/tier/prefetch`` asks of its scheduler."""

    def __init__(self, world: CacheWorld) -> None:
        self.world, self.cache = world, world.cache
        self._calls = Calls({"prefetch": prefetch})
        self.clock = Clock()
        tiering = self.cache.tiering
        tiering.hints._clock = self.clock
        self.hints: Hints = tiering.hints
        self._num_asked = 0
        self.piece_tokens = self.hints._loader._piece_tokens // PAGE * PAGE

    def hint(self, tokens: array[int], **keys: str) -> dict[str, Any]:
        """A new call, as an HTTP client makes one."""
        self._num_asked += 1
        body = {"input_ids": list(tokens), **keys}
        return self._calls.answer(self.cache, "prefetch", str(self._num_asked), body)

    def poll(self, number: int = 0) -> dict[str, Any]:
        """The same call asks again, by default the last one."""
        number = number or self._num_asked
        return self._calls.answer(self.cache, "prefetch", str(number), {"id": "x"})

    def wait(self) -> dict[str, Any]:
        """The call's last answer."""
        self.world.until(lambda: self.poll().get("done", True))
        return self.poll()

    def num_in_host(self, tokens: array[int]) -> int:
        return int(self.world.match(tokens).host_hit_length)

    def begin(self) -> None:
        """The first piece of a hint is being loaded."""
        self.hint(LONG)
        self.cache.check_hicache_events()
        assert self.cache.ongoing_prefetch

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.cache.check_hicache_events()

    def busy(self, patch: pytest.MonkeyPatch) -> None:
        """Others leave no room for a piece."""
        patch.setattr(self.cache.tiering.loads, "has_room_ahead", lambda _: False)

    def is_at_rest(self) -> bool:
        """Whether nothing of a hint is left anywhere but in its own books."""
        cache, planner = self.cache, self.cache.tiering.planner
        return not (
            cache.ongoing_prefetch
            or cache.prefetch_loaded_tokens_by_reqid
            or cache.cache_controller.prefetch_tokens_occupied
            or cache.storage_prefetch_retries._pending
            or cache._storage_prefetch_hit_remaining_by_reqid
            or planner.loads
            or any(planner._loading)
            or planner.num_waiting
            or any(
                not (isinstance(question, tuple) and question[0] == "hint lives")
                for question in cache.tiering.loads.agreement._questions
            )
        )


@pytest.fixture
def hinting(world: CacheWorld) -> HintWorld:
    world.store(LONG, SHORT)
    return HintWorld(world)


@pytest.fixture
def hold(disk: threading.Event) -> Callable[[], None]:
    """Reads that begin now wait until this is called."""
    disk.clear()
    return disk.set


def test_hint_brings_a_prompt_to_host_memory(hinting: HintWorld) -> None:
    begun = hinting.hint(LONG)
    assert begun == {**DONE, "done": False, "num_in_memory": 0, "num_loading": len(LONG)}
    assert hinting.wait() == DONE
    assert hinting.num_in_host(LONG) == len(LONG)
    assert hinting.is_at_rest()
    assert hinting.hint(LONG) == DONE, "and again there is nothing to do"
    stats = hinting.hints.stats()
    assert (stats.num_begun, stats.num_tokens_loaded) == (1, len(LONG))
    assert stats.ended[HintEnd.LOADED] == 1


def test_pairs_of_tokens_are_loaded_once(open_world: Callable[..., CacheWorld]) -> None:
    """Else the last page is loaded for ever: a page of pairs needs a token more than it has."""
    world, tokens = open_world(is_eagle=True), array("q", [*LONG, 7])
    world.store(tokens)
    hinting = HintWorld(world)
    assert not hinting.hint(tokens)["done"]
    assert hinting.wait() == DONE
    assert hinting.hints.stats().num_tokens_loaded == len(LONG)
    assert hinting.hint(tokens) == DONE
    assert hinting.hints.stats().num_begun == 1


def test_forgotten_conversation_is_not_loaded(hinting: HintWorld, hold: Callable[[], None]) -> None:
    hinting.begin()
    pages = map(bytes.fromhex, hashes_of(LONG)[1:])
    hinting.cache.hide(Erasure.of(pages, spread=False))
    assert not hinting.hints._queue.next()
    hold()
    hinting.world.until(hinting.is_at_rest)
    assert hinting.num_in_host(LONG) <= PAGE
    assert hinting.hint(LONG)["error"] == module.FORGOTTEN


def test_request_finds_one_piece_ahead(hinting: HintWorld, hold: Callable[[], None]) -> None:
    hinting.begin()
    cache = hinting.cache
    assert cache.cache_controller.prefetch_tokens_occupied == hinting.piece_tokens
    request = hinting.world.asks("r", SHORT)
    assert request in cache.ongoing_prefetch, "it waits for no more than that piece"
    hold()
    hinting.world.until(lambda: cache.load_has_ended(request))
    assert hinting.num_in_host(SHORT) == len(SHORT)
    assert hinting.num_in_host(LONG) <= hinting.piece_tokens, "no second piece before it"
    cache.tiering.loads.leaves(request)
    cache.pop_prefetch_loaded_span(request)
    assert hinting.wait() == DONE


def test_request_starts_without_waiting_for_a_hint(
    hinting: HintWorld, hold: Callable[[], None]
) -> None:
    """``yields`` lets loads of others arrive first that are nearly there."""
    hinting.begin()
    cold = hinting.world.asks("cold", prompt(9, 8))
    assert hinting.cache.check_prefetch_progress(cold)
    hold()


def test_same_conversation_twice_is_one_hint(hinting: HintWorld) -> None:
    hinting.hint(LONG)
    assert hinting.hint(LONG)["num_loading"] == len(LONG)
    assert hinting.hints.stats().num_begun == 1
    assert hinting.wait() == DONE
    assert hinting.poll(1) == DONE


def test_hint_without_room_matches_no_chain(
    hinting: HintWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = hinting.cache.tiering.loads
    monkeypatch.setattr(loads._window, "has_room_for_next", lambda *_: False)
    hinting.hint(LONG)
    monkeypatch.setattr(hinting.cache, "match_prefix", None)
    hinting.steps(20)
    assert not hinting.poll()["done"]


def test_hint_that_cannot_proceed_blocks_no_other(
    world: CacheWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device alone holds what is above its next page, say."""
    hints = world.cache.tiering.hints
    loader = hints._loader
    first, second = prompts = [prompt(number, 4) for number in range(2)]
    world.store(*prompts)
    chains = [Chain(tokens, None, None, hashes_of(tokens)) for tokens in prompts]
    for chain in chains:
        assert hints.begin(chain, 0, len(chain.tokens)) is not None
    begin, is_held_up = loader.begin, True

    def begin_late(chain: Chain, *given: Any) -> PieceOutcome:
        late = is_held_up and chain == chains[0]
        return loader._ends(PieceOutcome.LATER) if late else begin(chain, *given)

    monkeypatch.setattr(loader, "begin", begin_late)
    world.until(lambda: world.match(second).host_hit_length == len(second))
    is_held_up = False
    world.until(lambda: world.match(first).host_hit_length == len(first))


def test_busy_server_drops_a_hint_at_its_end(
    hinting: HintWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        hinting.busy(patch)
        hinting.hint(LONG)
        hinting.cache.check_hicache_events()
        hinting.clock.now += LIFE_S - 1
        hinting.cache.check_hicache_events()
        assert not hinting.poll()["done"]
        hinting.clock.now += 2
        hinting.cache.check_hicache_events()
    assert hinting.poll()["status"] == 503 and "60 s" in hinting.poll()["error"]
    assert hinting.hints.stats().ended[HintEnd.EXPIRED] == 1
    assert not hinting.hint(LONG)["done"], "its asker was told, and asks anew"
    assert hinting.wait() == DONE


def test_one_who_asks_later_is_told_once(hinting: HintWorld) -> None:
    hinting.hint(LONG)
    hinting.hints.end_all("gone")
    assert hinting.hint(LONG) == {"error": "gone", "status": 503}
    assert not hinting.hint(LONG)["done"]
    hinting.hints.end_all("gone again")
    hinting.clock.now += LIFE_S + 1
    hinting.cache.check_hicache_events()
    assert not hinting.hint(LONG)["done"], "what became of it long ago is nobody's concern"


def test_memory_that_others_need_withdraws_a_hint(
    hinting: HintWorld, hold: Callable[[], None]
) -> None:
    hinting.begin()
    hinting.cache.evict_host(hinting.world.num_host_tokens)
    hinting.cache.check_hicache_events()
    assert hinting.poll() == {"error": module.NO_MEMORY, "status": 503}
    hold()
    hinting.world.until(lambda: not hinting.cache.has_loads_under_way)
    assert hinting.is_at_rest()
    assert hinting.num_in_host(LONG) == 0


def test_load_without_room_withdraws_a_hint(hinting: HintWorld, hold: Callable[[], None]) -> None:
    loads = hinting.cache.tiering.loads
    hinting.begin()
    loads._window = PrefetchWindow(4 * PAGE)
    request = hinting.world.asks("r", SHORT)
    assert loads.planner.loads.get(request).put_off is not None
    hinting.cache.check_hicache_events()
    assert hinting.poll() == {"error": module.NO_MEMORY, "status": 503}
    request = hinting.world.asks("r", SHORT)
    assert request in hinting.cache.ongoing_prefetch
    hold()
    hinting.world.until(lambda: hinting.cache.load_has_ended(request))
    assert hinting.num_in_host(SHORT) == len(SHORT)


def test_pages_evicted_before_the_end_withdraw_a_hint(
    hinting: HintWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    hinting.hint(LONG)
    hinting.world.until(lambda: hinting.hints.stats().num_tokens_loaded == hinting.piece_tokens)
    with monkeypatch.context() as patch:
        hinting.busy(patch)
        hinting.world.until(lambda: not hinting.cache.ongoing_prefetch)
        monkeypatch.setattr(hinting.hints, "note_memory_is_short", lambda: None)
        hinting.cache.evict_host(hinting.world.num_host_tokens)
    hinting.world.until(lambda: hinting.poll().get("done", True))
    assert hinting.poll() == {"error": module.NO_MEMORY, "status": 503}


def test_host_memory_without_pages_withdraws_a_hint(hinting: HintWorld) -> None:
    pool = hinting.cache.cache_controller.mem_pool_host
    taken = pool.alloc(pool.available_size())
    hinting.hint(LONG)
    hinting.steps(4)
    assert hinting.poll() == {"error": module.NO_MEMORY, "status": 503}
    pool.free(taken)
    assert hinting.is_at_rest()


def test_hints_together_are_bounded(hinting: HintWorld) -> None:
    hinting.hints._queue.capacity = len(LONG)
    assert not hinting.hint(LONG)["done"]
    refusal = hinting.hint(SHORT)
    assert refusal["status"] == 503 and str(len(LONG)) in refusal["error"]
    hinting._num_asked = 1
    assert hinting.wait() == DONE
    assert hinting.hint(SHORT)["status"] == 503, "nobody has used the first yet"
    last = hinting.hints._hinted.get(hashes_of(LONG)[-1])
    assert last is not None
    hinting.hints.note_use(last.chain.hashes[-1:])
    hinting.hint(SHORT)
    assert hinting.wait()["num_in_memory"] == len(SHORT)


def test_used_part_of_a_prompt_gives_room_back(hinting: HintWorld) -> None:
    """Which came in part, for it is longer than all hints together may be."""
    hinting.hints._queue.capacity = 30 * PAGE
    assert hinting.hint(LONG)["num_loading"] == 30 * PAGE
    assert hinting.wait()["num_in_memory"] == 30 * PAGE
    assert hinting.hint(SHORT)["status"] == 503
    hinting.hints.note_use(hashes_of(LONG)[29:30])
    hinting.hint(SHORT)
    assert hinting.wait()["num_in_memory"] == len(SHORT)


def test_prompt_used_while_it_loads_holds_no_room(
    hinting: HintWorld, hold: Callable[[], None]
) -> None:
    hinting.begin()
    hinting.hints.note_use(hashes_of(LONG)[-1:])
    hold()
    assert hinting.wait() == DONE
    assert hinting.hints._queue.num_tokens == 0
    hinting.hints._queue.check_integrity()


def test_piece_looks_up_no_more_than_itself(
    hinting: HintWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a long prompt costs the square of its length."""
    hinting.hint(LONG)
    storage, looked = hinting.cache.storage, []
    lookup = storage.lookup_spans

    def look(hashes: list[str]) -> Any:
        looked.append(len(hashes))
        return lookup(hashes)

    monkeypatch.setattr(storage, "lookup_spans", look)
    assert hinting.wait() == DONE
    assert looked and max(looked) * PAGE <= hinting.piece_tokens


def test_what_does_not_pay_is_not_loaded(
    hinting: HintWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hinting.cache.tiering.planner, "plan_ahead", lambda *_, **__: 0)
    hinting.hint(LONG)
    assert hinting.wait() == {**DONE, "num_in_memory": 0}
    assert hinting.num_in_host(LONG) == 0


def test_damaged_page_ends_a_hint(hinting: HintWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    nvme = hinting.cache.storage.stack.nvme
    for path in nvme.directory.rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 20:
            data = bytearray(path.read_bytes())
            for at in range(8192, len(data), 4096):
                data[at] ^= 0xFF
            path.write_bytes(data)
    hinting.hint(LONG)
    hinting.world.until(lambda: hinting.poll().get("done", True))
    assert hinting.num_in_host(LONG) == 0
    assert hinting.is_at_rest()


def why_dropped(hinting: HintWorld) -> str | None:
    found = hinting.hints._hinted.get(hashes_of(LONG)[-1])
    assert found is not None
    return found.why_dropped


def purge(hinting: HintWorld) -> None:
    hinting.hints.erase(Erasure(tenant=hinting.cache.hidden_tenants.tenant_of(None, None)))


@pytest.mark.parametrize(
    ("take", "is_held", "why"),
    [
        pytest.param(lambda hinting: hinting.cache.reset(), False, module.EMPTIED, id="flush"),
        pytest.param(purge, True, module.PURGED, id="purge"),
        pytest.param(
            lambda hinting: hinting.cache.change_weights(tree_is_empty=False),
            True,
            module.WEIGHTS,
            id="weights",
        ),
    ],
)
def test_what_takes_its_pages_ends_a_hint(
    hinting: HintWorld,
    hold: Callable[[], None],
    take: Callable[[HintWorld], None],
    is_held: bool,
    why: str,
) -> None:
    hinting.begin()
    if not is_held:
        hold()
    take(hinting)
    assert why_dropped(hinting) == why
    hold()
    hinting.world.until(lambda: not hinting.cache.has_loads_under_way)
    assert hinting.poll() == {"error": why, "status": 503}
    assert hinting.is_at_rest()
    assert hinting.num_in_host(LONG) == 0


def test_detached_tiers_end_a_hint(hinting: HintWorld, hold: Callable[[], None]) -> None:
    hinting.begin()
    hold()
    hinting.hints.end_all(module.EMPTIED)
    hinting.world.until(lambda: not hinting.cache.has_loads_under_way)
    assert hinting.cache.detach_storage_backend()[0]
    assert why_dropped(hinting) == module.EMPTIED
    assert hinting.poll()["status"] == 503
    assert hinting.is_at_rest()
    assert hinting.num_in_host(LONG) == 0


@pytest.mark.parametrize("others_run", [False, True])
def test_hint_under_way_refuses_no_flush(
    hinting: HintWorld,
    hold: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    others_run: bool,
) -> None:
    cache = hinting.cache
    control = Control()
    control._cache, control._scheduler = (
        cache,
        SimpleNamespace(_engine_paused=False, is_fully_idle=lambda **_: not others_run),
    )
    hinting.begin()
    end_all = hinting.hints.end_all

    def end_and_read_on(why: str) -> None:
        end_all(why)
        assert cache.has_loads_under_way
        if not others_run:
            hold()

    monkeypatch.setattr(hinting.hints, "end_all", end_and_read_on)
    control.rest()
    assert cache.has_loads_under_way == others_run, "where a flush fails anyway nothing waits"
    assert hinting.poll() == {"error": module.EMPTIED, "status": 503}


def test_hung_tier_holds_no_flush_up(
    hinting: HintWorld, hold: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = hinting.cache
    hinting.hint(LONG)
    cache.check_hicache_events()
    hinting.hints.end_all(module.EMPTIED)
    monkeypatch.setattr(quiescing, "REST_S", 0.0)
    quiescing.wait_for_loads(cache, lambda: cache.has_loads_under_way)
    assert cache.has_loads_under_way


def test_other_tenants_purge_leaves_a_hint(hinting: HintWorld) -> None:
    hinting.hint(LONG)
    hinting.hints.erase(Erasure(tenant=hinting.cache.hidden_tenants.tenant_of("other", None)))
    assert hinting.wait() == DONE


def test_purge_elsewhere_stops_no_hint(hinting: HintWorld) -> None:
    """It lasts for as long as the server is busy."""
    hinting.cache.hidden_tenants.quarantine(None)
    hinting.hint(LONG)
    hinting.cache.hidden_tenants.quarantine(b"other")
    assert hinting.wait() == DONE


def test_tenants_hint_touches_no_other(hinting: HintWorld) -> None:
    hinting.hint(LONG, extra_key="acme")
    assert hinting.wait() == {**DONE, "num_in_memory": 0}
    assert hinting.num_in_host(LONG) == 0
    assert hinting._calls.answer(hinting.cache, "prefetch", "n", {"rid": "nobody"}) == {
        "done": True,
        "unknown": True,
    }


def test_unknown_namespace_is_no_miss(hinting: HintWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(hinting.cache.storage), "knows_namespace", False)
    assert hinting.hint(LONG)["status"] == 503


def test_pipelines_load_nothing_ahead(hinting: HintWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hinting.cache, "tiering", None)
    assert "pipeline parallelism" in hinting.hint(LONG)["error"]


class OtherRank:
    """What another rank answers to the questions of this one."""

    def __init__(self) -> None:
        self.end = SILENT  # of a piece
        self.lives = SILENT

    def __call__(self, question: Any) -> int:
        is_of_life = isinstance(question, tuple) and question[0] == "hint lives"
        return self.lives if is_of_life else self.end


@pytest.fixture
def other(hinting: HintWorld, monkeypatch: pytest.MonkeyPatch) -> OtherRank:
    rank = OtherRank()
    hinting.world.has_ranks(monkeypatch, rank)
    return rank


def test_ranks_load_the_shortest_piece(hinting: HintWorld, other: OtherRank) -> None:
    other.end = told_end(3 * PAGE)
    hinting.hint(LONG)
    hinting.steps(1)
    assert not hinting.cache.ongoing_prefetch, "the other rank has not answered"
    hinting.world.until(lambda: hinting.hints.stats().num_tokens_loaded)
    assert hinting.num_in_host(LONG) == 3 * PAGE
    other.end = DECLINED
    hinting.world.until(lambda: hinting.poll()["done"])
    assert hinting.poll()["num_in_memory"] == 3 * PAGE
    assert hinting.is_at_rest()


def test_another_ranks_clock_ends_a_hint(hinting: HintWorld, other: OtherRank) -> None:
    hinting.hint(LONG)
    hinting.steps(1)
    other.lives = 0
    hinting.world.until(lambda: hinting.hints.stats().ended[HintEnd.EXPIRED])
    assert hinting.poll()["status"] == 503


def test_another_ranks_store_bounds_a_hint(
    hinting: HintWorld, other: OtherRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        calls, "least_on_every_rank", lambda _, values: [values[0], min(values[1], 5 * PAGE)]
    )
    assert hinting.hint(LONG)["num_loading"] == 5 * PAGE


def test_hint_overtakes_no_load_that_waits(hinting: HintWorld) -> None:
    """A request whose load waits for room is not overtaken."""
    loads = hinting.cache.tiering.loads
    loads._window = PrefetchWindow(4 * PAGE)
    someone = CacheRequestHandle("someone", 0)
    put_off = loads._window.put_off_load(someone, 4 * PAGE)
    hinting.hint(LONG)
    hinting.steps(3)
    assert not hinting.cache.ongoing_prefetch
    loads._window.withdraw_load(put_off)
    assert hinting.wait() == DONE


def test_models_with_windows_load_what_restores(open_world: Callable[..., CacheWorld]) -> None:
    """Their states lie at some places only, so a piece is longer there."""
    world = open_world(has_window=True)
    world.store(LONG)
    hinting = HintWorld(world)
    hinting.hint(LONG)
    assert hinting.wait() == DONE
    assert hinting.num_in_host(LONG) == len(LONG)
    assert hinting.is_at_rest()


def test_small_host_tier_loads_below_the_device(open_world: Callable[..., CacheWorld]) -> None:
    """The front is on the device, whose copy in host memory has given way; it is made again."""
    world, whole = open_world(is_small=True), prompt(3, 12)
    world.store(whole)
    world.compute(whole[: 4 * PAGE])
    world.until(lambda: not world.cache.ongoing_backup)
    world.cache.evict_host(world.num_host_tokens)
    hinting = HintWorld(world)
    assert hinting.hint(whole)["num_in_memory"] == 4 * PAGE
    assert hinting.wait()["num_in_memory"] == len(whole)
    assert hinting.num_in_host(whole) == len(whole) - 4 * PAGE
    assert hinting.is_at_rest()


def test_small_host_tier_takes_what_fits(open_world: Callable[..., CacheWorld]) -> None:
    world = open_world(is_small=True)
    world.store(LONG)
    hinting = HintWorld(world)
    begun = hinting.hint(LONG)["num_loading"]
    assert 0 < begun < len(LONG)
    assert hinting.wait()["num_in_memory"] == begun == hinting.num_in_host(LONG)
