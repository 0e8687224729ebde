"""Hints over SGLang's own tree and a real store: what they bring, and what ends them."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from cache_world import PAGE, CacheWorld, hashes_of, prompt
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

from kit.clock import Clock
from sglang_tiered.integration.admin import calls
from sglang_tiered.integration.admin.calls import Calls
from sglang_tiered.integration.admin.control import Control
from sglang_tiered.integration.admin.conversations import prefetch
from sglang_tiered.integration.cache import hints as module
from sglang_tiered.integration.cache.hints import LIFE_S, HintEnd, Hints, piece_length
from sglang_tiered.integration.cache.load_scheduler import DECLINED, told_end
from sglang_tiered.integration.cache.loads import RequestLoad, Turns
from sglang_tiered.integration.ranks import SILENT
from sglang_tiered.policy.queue_wait import QueueWait
from sglang_tiered.storage.base import Erasure, Span, Tier

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
        self.piece_tokens = self.hints._piece_tokens // PAGE * PAGE

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


@pytest.mark.parametrize("kind", [None, "has_window", "is_eagle"])
def test_hint_brings_a_prompt_once(open_world: Callable[..., CacheWorld], kind: str | None) -> None:
    """States of windows lie at some places only, so a piece is longer there; and a page of pairs
    needs a token more than it has, or its last page is loaded for ever."""
    world = open_world(**({kind: True} if kind else {}))
    tokens = array("q", [*LONG, 7]) if kind == "is_eagle" else LONG
    world.store(tokens)
    hinting = HintWorld(world)
    begun = hinting.hint(tokens)
    assert begun == {**DONE, "done": False, "num_in_memory": 0, "num_loading": len(LONG)}
    assert hinting.wait() == DONE
    assert hinting.is_at_rest()
    assert kind == "is_eagle" or hinting.num_in_host(LONG) == len(LONG)
    assert hinting.hint(tokens) == DONE, "and again there is nothing to do"
    hints = hinting.hints
    assert (hints.num_begun, hints.num_tokens_loaded) == (1, len(LONG))
    assert hints.ended[HintEnd.LOADED] == 1


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


def test_busy_server_drops_a_hint_at_its_end(
    hinting: HintWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(hinting.cache.tiering.loads, "has_room_ahead", lambda _: False)
        hinting.hint(LONG)
        hinting.cache.check_hicache_events()
        hinting.clock.now += LIFE_S - 1
        hinting.cache.check_hicache_events()
        assert not hinting.poll()["done"]
        hinting.clock.now += 2
        hinting.cache.check_hicache_events()
    assert hinting.poll()["status"] == 503 and "60 s" in hinting.poll()["error"]
    assert hinting.hints.ended[HintEnd.EXPIRED] == 1
    assert not hinting.hint(LONG)["done"], "its asker was told, and asks anew"
    assert hinting.wait() == DONE


def test_hints_together_are_bounded(hinting: HintWorld) -> None:
    hinting.hints._queue.capacity = len(LONG)
    assert not hinting.hint(LONG)["done"]
    refusal = hinting.hint(SHORT)
    assert refusal["status"] == 503 and str(len(LONG)) in refusal["error"]
    hinting._num_asked = 1
    assert hinting.wait() == DONE
    assert hinting.hint(SHORT)["status"] == 503, "nobody has used the first yet"
    last = hinting.hints._queue.get(hashes_of(LONG)[-1])
    assert last is not None
    hinting.hints.note_use(last.chain.hashes[-1:])
    hinting.hint(SHORT)
    assert hinting.wait()["num_in_memory"] == len(SHORT)


def test_what_does_not_pay_is_not_loaded(
    hinting: HintWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hinting.cache.tiering.planner, "plan_ahead", lambda *_, **__: 0)
    hinting.hint(LONG)
    assert hinting.wait() == {**DONE, "num_in_memory": 0}
    assert hinting.num_in_host(LONG) == 0


def purge(hinting: HintWorld) -> None:
    hinting.hints.erase(Erasure(tenant=hinting.cache.hidden_tenants.tenant_of(None, None)))


def forget(hinting: HintWorld) -> None:
    hinting.cache.hide(Erasure.of(map(bytes.fromhex, hashes_of(LONG)), spread=False))


@pytest.mark.parametrize(
    ("take", "is_held", "why"),
    [
        pytest.param(lambda hinting: hinting.cache.reset(), False, module.EMPTIED, id="flush"),
        pytest.param(purge, True, module.PURGED, id="purge"),
        pytest.param(forget, True, module.FORGOTTEN, id="forget"),
        pytest.param(
            lambda hinting: hinting.cache.change_weights(tree_is_empty=False),
            True,
            module.WEIGHTS,
            id="weights",
        ),
        pytest.param(
            lambda hinting: hinting.cache.evict_host(hinting.world.num_host_tokens),
            True,
            module.NO_MEMORY,
            id="others need its memory",
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
    hinting.steps(1)
    assert hinting.poll() == {"error": why, "status": 503}
    hold()
    hinting.world.until(lambda: not hinting.cache.has_loads_under_way)
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
    scheduler = SimpleNamespace(_engine_paused=False, is_fully_idle=lambda **_: not others_run)
    control = Control()
    control._cache, control._scheduler = cache, scheduler
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


def test_tenants_hint_touches_no_other(hinting: HintWorld) -> None:
    hinting.hint(LONG, extra_key="acme")
    assert hinting.wait() == {**DONE, "num_in_memory": 0}
    assert hinting.num_in_host(LONG) == 0


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
    hinting.world.until(lambda: hinting.hints.num_tokens_loaded)
    assert hinting.num_in_host(LONG) == 3 * PAGE
    other.end = DECLINED
    hinting.world.until(lambda: hinting.poll()["done"])
    assert hinting.poll()["num_in_memory"] == 3 * PAGE
    assert hinting.is_at_rest()


def test_another_ranks_store_bounds_a_hint(
    hinting: HintWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = lambda _, values: [values[0], *(min(each, 5 * PAGE) for each in values[1:])]  # noqa: E731
    monkeypatch.setattr(calls, "least_on_every_rank", least)
    assert hinting.hint(LONG)["num_loading"] == 5 * PAGE


def test_another_ranks_clock_ends_a_hint(hinting: HintWorld, other: OtherRank) -> None:
    hinting.hint(LONG)
    hinting.steps(1)
    other.lives = 0
    hinting.world.until(lambda: hinting.hints.ended[HintEnd.EXPIRED])
    assert hinting.poll()["status"] == 503


def test_ranks_answer_for_one_hint_is_no_others(hinting: HintWorld, other: OtherRank) -> None:
    """One that had to be passed over is asked for, and then another comes."""
    other.end = told_end(3 * PAGE)
    hinting.hint(LONG)
    hinting.steps(1)
    served = hinting.hints._served
    assert served is not None
    served.num_passed = 1
    hinting.hint(SHORT)
    hinting.steps(1)
    assert not hinting.cache.ongoing_prefetch, "nobody has answered for this one"
    hinting.steps(1)
    assert hinting.cache.ongoing_prefetch


def test_hint_that_no_tier_gives_ends(hinting: HintWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the same pages would be asked for until its life ends."""
    spans = lambda hashes: [Span(Tier.NVME, len(hashes))]  # noqa: E731
    monkeypatch.setattr(hinting.cache.storage, "lookup_spans", spans)
    assert hinting.hint(prompt(3, 4))["num_loading"] == 4 * PAGE
    assert hinting.wait() == {"error": module.NOT_READ, "status": 503}
    assert hinting.is_at_rest()


def test_hint_whose_piece_is_evicted_ends(
    hinting: HintWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would load for ever what memory has no room for."""
    hinting.begin()
    with monkeypatch.context() as busy:
        busy.setattr(hinting.cache.tiering.loads, "has_room_ahead", lambda _: False)
        hinting.world.until(lambda: hinting.hints.num_tokens_loaded)
    assert hinting.cache.evict_host(hinting.piece_tokens) == hinting.piece_tokens
    hinting.steps(1)
    assert hinting.poll() == {"error": module.NO_MEMORY, "status": 503}
    assert hinting.is_at_rest()


def test_hint_overtakes_no_load_that_waits(hinting: HintWorld) -> None:
    """A request whose load waits for room is not overtaken."""
    loads = hinting.cache.tiering.loads
    loads._turns = Turns(4 * PAGE)
    place = QueueWait().arrives(None, 1.0, 0.0, is_busy=False)
    someone = RequestLoad(CacheRequestHandle("someone", 0), place=place)
    loads._turns.put_off(someone, 4 * PAGE)
    hinting.hint(LONG)
    hinting.steps(3)
    assert not hinting.cache.ongoing_prefetch
    loads._turns.withdraw(someone)
    assert hinting.wait() == DONE


@given(
    st.integers(0, 1 << 14),
    st.integers(1, 4096),
    st.integers(1, 4096),
    st.none() | st.lists(st.integers(1, 1 << 14), unique=True, max_size=5).map(sorted),
)
def test_pieces_end_where_a_load_may(
    num_pages: int, page: int, piece: int, ends: list[int] | None
) -> None:
    places = None if ends is None else [page * end for end in ends]
    length = piece_length(num_pages * page, page_tokens=page, piece_tokens=piece, ends=places)
    size = max(page, piece // page * page)
    if places is None:
        assert length % page == 0 and length <= size
        assert (length > 0) == (num_pages > 0), "pieces come to an end"
    else:
        long_enough = [place for place in places if place >= size]
        assert length == (long_enough or places[-1:] or [0])[0]
