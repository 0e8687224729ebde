"""Conversations that are forgotten, over the real tree and a real store."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cache_world import PAGE, CacheWorld, cache_world, prompt
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_tiered.api import CallError
from sglang_tiered.budgets import WINDOW_S
from sglang_tiered.integration.admin import conversations
from sglang_tiered.integration.admin.calls import DETACHED, Calls
from sglang_tiered.integration.admin.conversations import Forgets, _longest, forget, pin
from sglang_tiered.integration.identity.recent_requests import PrefixSelector
from sglang_tiered.integration.identity.tenants import tenant_digest
from sglang_tiered.storage.base import NO_TENANT
from sglang_tiered.storage.promises import ended

TOKENS, OTHER = prompt(1, 6), prompt(2, 2)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheWorld]:
    with cache_world(tmp_path / "kv", monkeypatch) as world:
        world.store(TOKENS, OTHER)
        world.compute(TOKENS)
        world.until(lambda: not world.cache.is_under_way())
        yield world


def asker(
    world: CacheWorld, forgets: Forgets | None = None
) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """Asks a scheduler to forget, by the number of the call."""
    calls = Calls({"forget": partial(forget, forgets or Forgets())})
    return partial(calls.answer, world.cache, "forget")


def residency(world: CacheWorld, body: dict[str, Any]) -> dict[str, Any]:
    return Calls({"residency": conversations.residency}).answer(world.cache, "residency", "n", body)


def answer(world: CacheWorld, **body: Any) -> dict[str, Any]:
    """The answer once it is done, as the service asks for it."""
    ask = asker(world)
    got = ask("n", body)

    def is_done() -> bool:
        got.update(ask("n", {}))
        return bool(got.get("done"))

    if not got.get("done") and "error" not in got:
        world.until(is_done)
    return got


def held(world: CacheWorld, tokens: array[int]) -> tuple[int, int]:
    """Leading pages in memory, and on NVMe."""
    match = world.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None)))
    by_tier = residency(world, {"input_ids": tokens.tolist()})
    assert by_tier["device"] <= match.device_prefix_len
    return (match.device_prefix_len + match.host_hit_length) // PAGE, by_tier["nvme"] // PAGE


@pytest.mark.parametrize(("keep", "kept"), [(0, 0), (1, 1), (2 * PAGE, 2), (6 * PAGE, 6)])
def test_whole_pages_behind_what_is_kept_go(world: CacheWorld, keep: int, kept: int) -> None:
    assert held(world, TOKENS) == (6, 6)
    got = answer(world, input_ids=TOKENS.tolist(), keep_tokens=keep)
    assert got == {"done": True, "durable": True, "num_tokens": (6 - kept) * PAGE}
    assert held(world, TOKENS) == (kept, kept)
    assert held(world, OTHER)[1] == 2


def test_neighbours_rid_is_unknown(world: CacheWorld) -> None:
    """Clients choose rids, so one tenant may guess another's."""
    recents, keys = world.cache.recent_requests, {"extra_key": "acme", "cache_salt": "s"}
    recents.note_request("r", PrefixSelector(TOKENS, None, None), NO_TENANT)
    unknown = {"done": True, "unknown": True}
    assert answer(world, rid="r", keep_tokens=0, **keys) == unknown
    assert residency(world, {"rid": "r", "cache_salt": "s"}) == unknown
    recents.note_request("r", PrefixSelector(TOKENS, "acme", "s"), tenant_digest("acme", "s"))
    assert answer(world, rid="r", keep_tokens=0, extra_key="acme") == unknown
    assert answer(world, rid="r", keep_tokens=0, **keys)["num_tokens"] == 6 * PAGE


def test_too_many_pages_change_nothing(world: CacheWorld) -> None:
    """Another tenant's would go for pages that never were."""
    ask = asker(world, Forgets(7))
    everything = {"input_ids": TOKENS.tolist(), "keep_tokens": 0}
    assert "error" not in ask("m", {"hashes": ["ff" * 32] * 2})
    for number, body in (("o", everything), ("p", {"hashes": ["00" * 32] * 6})):
        got = ask(number, body)
        assert got["status"] == 503 and "or ask again after 3" in got["error"]
    got = ask("q", {"hashes": ["00" * 32] * 8})
    assert got["status"] == 503 and got["error"].endswith("use a purge of the tenant")
    assert held(world, TOKENS) == (6, 6)
    assert "error" not in ask("r", {**everything, "keep_tokens": PAGE})


def test_asking_again_takes_no_other_tenants_allowance(world: CacheWorld) -> None:
    """A server that is away makes each ask until it is back. That has a bound too."""
    ask, body = asker(world, Forgets(7)), {"hashes": [f"{page:064x}" for page in range(100, 103)]}
    for number in ("1", "2", "3"):
        assert "error" not in ask(number, body)
    assert "error" not in ask("other", {"hashes": [f"{page:064x}" for page in range(4)]})
    assert "or ask again after 3" in ask("4", body)["error"]


def test_an_hour_later_pages_are_new_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what was ever forgotten would be kept, and count as asked again."""
    clock, forgets = SimpleNamespace(monotonic=lambda: 0.0), Forgets(3)
    monkeypatch.setattr(conversations, "time", clock)

    def spend() -> None:
        steps = forgets.spend(["a", "b", "c"])
        waits = next(steps)
        with pytest.raises(StopIteration):
            steps.send(waits)

    spend()
    clock.monotonic = lambda: WINDOW_S
    spend()
    spend()
    with pytest.raises(CallError, match="ask again after 3600 s"):
        spend()


def test_branches_are_compared_in_linear_time() -> None:
    """The scheduler serves nobody else meanwhile."""
    common = array("q", range(4000))
    branches = [PrefixSelector(common + array("q", [end] * 64), None, None) for end in range(3000)]
    beginnings = [PrefixSelector(common[:end], None, None) for end in range(1, 3000)]
    other = PrefixSelector(common[:5], "key", None)
    begun = time.process_time()
    found = _longest([*branches, *beginnings, other, other])
    assert time.process_time() - begun < 20, "pair by pair they take minutes"
    assert sorted(found, key=lambda one: (len(one.tokens), one.tokens[-1])) == [other, *branches]


def test_detached_tiers_do_not_answer_durable(world: CacheWorld) -> None:
    assert world.cache.detach_storage_backend()[0]
    got = answer(world, input_ids=TOKENS.tolist(), keep_tokens=0)
    assert got["status"] == 503 and got["error"] == DETACHED
    match = world.cache.match_prefix(MatchPrefixParams(key=RadixKey(TOKENS, None)))
    assert match.device_prefix_len == match.host_hit_length == 0


def test_pages_named_before_the_weights_are_known(
    world: CacheWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names hold for every namespace, but a bucket needs to know which."""
    storage = world.cache.storage
    told: list[Any] = []
    monkeypatch.setattr(storage, "_search", SimpleNamespace(answer=None))
    monkeypatch.setattr(storage.stack, "remote", {"bucket": None})
    monkeypatch.setattr(storage.stack, "erase", lambda what: told.append(what.keys) or ended(True))
    ask = asker(world)
    got = ask("n", {"input_ids": TOKENS.tolist(), "keep_tokens": 0})
    assert not got["done"] and not told
    hashes = world.cache.page_hashes(RadixKey(TOKENS, None))
    assert not any(storage.region_engine.contains([bytes.fromhex(each) for each in hashes]))
    storage._erase_late()
    world.until(lambda: ask("n", {})["durable"])
    assert [len(keys) for keys in told] == [6]
    monkeypatch.undo()


def test_pages_named_after_a_purge_are_hidden(world: CacheWorld) -> None:
    """A replica that knows no rid is told hashes, which are those of a marked key too."""
    cache = world.cache
    hashes = cache.page_hashes(RadixKey(TOKENS, None))
    cache.hidden_tenants.quarantine(None)
    key = RadixKey(TOKENS, cache.hidden_tenants.key_of(None, None))
    cache.insert(InsertParams(key=key, value=world.alloc(len(TOKENS))))
    assert cache.match_visible(key).device_prefix_len == len(TOKENS)
    answer(world, hashes=hashes[3:])
    assert cache.match_visible(key).device_prefix_len == 3 * PAGE


def test_no_stage_promises_for_the_others(world: CacheWorld) -> None:
    """The first alone answers, and the disk of another may take nothing."""
    world.cache.pp_size = 2
    body = {"input_ids": TOKENS.tolist()}
    calls = {"checkpoint": conversations.checkpoint, "pin": pin}
    for name in calls:
        got = Calls(calls).answer(world.cache, name, "n", {**body, "now": 0.0})
        assert got["status"] == 400 and "with --pp-size above 1" in got["error"]
    ask = asker(world)
    ask("n", {**body, "keep_tokens": 0})
    world.until(lambda: ask("n", {}).get("status") == 503)
    assert "nobody can tell that of the others" in ask("n", {})["error"]
    assert held(world, TOKENS) == (0, 0)
