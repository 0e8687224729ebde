"""What announces pages of lower tiers ends no scheduler, and loses no change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cache_world import PAGE, cache_world, hashes_of, prompt
from sglang.srt.disaggregation.kv_events import BlockStored, StorageMedium

from sglang_tiered.integration.observe import kv_events
from sglang_tiered.integration.observe.kv_events import TierEvents


class EmptyCore:
    """A tree whose nodes were all evicted."""

    is_eagle = False

    def collect_path_info(self, node_ids: list[int]) -> Any:
        raise KeyError(node_ids[0])


@pytest.fixture
def events() -> TierEvents:
    return Router(EmptyCore(), 1000).events


def test_node_that_was_evicted_ends_the_scheduler(events: TierEvents) -> None:
    events.announce_node(77)
    assert events.take_events() == []


def test_step_after_a_long_pause_is_short(events: TierEvents) -> None:
    """A request that wakes an idle server waits for it."""
    now, asked = [events._due], list[int]()
    events._clock = lambda: now[0]
    events.use_tiers(
        {StorageMedium.DISK: lambda keys: asked.append(len(keys)) or [True] * len(keys)}
    )
    for number in range(2 * 4096):
        event = BlockStored([number], None, list(range(4)), 4, None)
        events._set_held(number.to_bytes(32, "big"), kv_events._Page(event), 1)
    for _ in range(5):
        now[0] += 3600.0
        events.step()
    assert asked == [0, 4096, 4096, 0, 4096], "all in their turn"


def test_a_failing_tier_ends_no_scheduler(events: TierEvents) -> None:
    def fails(_: Sequence[bytes]) -> list[bool]:
        raise RuntimeError("an internal error")

    now, told = [events._due], list[bool]()
    events._clock = lambda: now[0]
    events.use_tiers({StorageMedium.DISK: fails})
    events._set_held(bytes(32), kv_events._Page(BlockStored([0], None, [0] * 4, 4, None)), 1)
    for number in range(4):
        now[0] += 3600.0
        events.step()
        if number == 1:
            holds = {StorageMedium.DISK: lambda keys: told.append(True) or [True] * len(keys)}
            events.use_tiers(holds)
    assert told


class Router:
    """A tier that holds what a test says, and what is known of it by its events."""

    def __init__(self, core: Any, max_pages: int) -> None:
        params: Any = SimpleNamespace(
            page_size=PAGE, dynamo_kv_event_format=False, kv_event_lora_names=None
        )
        self.held, self.is_sick, self.known = set[bytes](), False, set[int]()
        self.forgets = max_pages < 1000
        tiers = {StorageMedium.DISK: self.holds}
        clock = partial(next, itertools.count())  # in each step it is time for more
        self.events = TierEvents(core, tiers, params, max_pages=max_pages, clock=clock)

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.held and not self.is_sick for key in keys]

    @property
    def names(self) -> set[int]:
        return self.names_of(self.held)

    @staticmethod
    def names_of(keys: set[bytes]) -> set[int]:
        return {int.from_bytes(key[:8], "big", signed=True) for key in keys}

    def follow(self) -> None:
        for event in self.events.take_events():
            blocks = set(event.block_hashes)
            if isinstance(event, BlockStored):
                front = event.parent_block_hash
                assert front is None or front in self.known or self.forgets, "out of order"
                assert not blocks & self.known
                self.known |= blocks
            else:
                assert blocks <= self.known
                self.known -= blocks

    def settle(self) -> None:
        for _ in range(3):  # what is left of one sweep, and a whole one
            self.events.step()
        while self.events._changed:
            self.follow()


@pytest.mark.parametrize("max_pages", [16, 1000])
def test_sweep_and_scheduler_lose_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_pages: int
) -> None:
    """In turns, while pages come and go. Beyond the bound a router knows less, and nothing that is
    not so."""
    monkeypatch.setattr(kv_events, "CHUNK_PAGES", 64)
    with cache_world(tmp_path / "kv", monkeypatch) as world:
        router = Router(world.cache.tree_core, max_pages)
        prompts = [prompt(number, 2) for number in range(24)]
        for turn, tokens in enumerate(prompts):
            world.compute(tokens)
            router.held |= set(map(bytes.fromhex, hashes_of(tokens)))
            router.events.announce_node(world.match(tokens).best_match_node)
            if turn % 3 == 0:
                router.held -= set(map(bytes.fromhex, hashes_of(prompts[turn // 2])))
            router.events.step()
            router.follow()
        router.settle()
        assert 0 < len(router.events._pages) <= max_pages
        assert router.known <= router.names and (max_pages == 16 or router.known == router.names)
        before, router.is_sick = set(router.known), True
        router.settle()
        assert not router.known, "nobody can read them"
        router.is_sick = False
        router.settle()
        assert router.known == before
        router.events.tree_was_reset()
        router.known.clear()  # as SGLang's own event has it, of all media
        router.settle()
        assert router.known == before


def test_lost_pages_go_before_those_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then what was announced first: what comes back is as good as new."""
    with cache_world(tmp_path / "kv", monkeypatch) as world:
        router = Router(world.cache.tree_core, max_pages=4)
        first, second, third = (prompt(number, 2) for number in range(3))
        pages = {
            str(one): set(map(bytes.fromhex, hashes_of(one))) for one in (first, second, third)
        }

        def stores(tokens: Any, *held: Any) -> None:
            """Have the tier hold these alone, and some of them announced."""
            world.compute(tokens)
            router.held = set().union(*(pages[str(one)] for one in held))
            router.settle()
            router.events.announce_node(world.match(tokens).best_match_node)
            router.settle()

        stores(first, first)
        stores(second, first, second)
        stores(third, first, third)
        assert router.known == router.names, "the second was lost, so the first may stay"
        stores(first, third)
        stores(first, first, third)
        stores(second, first, second, third)
        assert router.known == router.names_of(pages[str(first)] | pages[str(second)])
