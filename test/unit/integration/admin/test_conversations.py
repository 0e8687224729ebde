"""Conversations by id, their pins and their list, and what is forgotten of them, over SGLang's tree
and a real store."""

from __future__ import annotations

import time
from array import array
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from cache_world import PAGE, CacheWorld, cache_world, prompt
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_tiered.api import CallError
from sglang_tiered.budgets import MAX_KEYS, WINDOW_S
from sglang_tiered.integration.admin import calls, conversations, listing
from sglang_tiered.integration.admin.control import Control
from sglang_tiered.integration.admin.prefixes import (
    keepers,
    locate,
    prefix_of_body,
    prefixes_of_body,
)
from sglang_tiered.integration.identity.recent_requests import PrefixSelector
from sglang_tiered.integration.identity.tenants import tenant_digest
from sglang_tiered.storage.base import NO_TENANT, PinRefusal, Tier
from sglang_tiered.storage.promises import ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch

    Open = Callable[[], AbstractContextManager[CacheWorld]]

DEADLINE_S = 60.0
GONE = {"done": True, "unknown": conversations.NO_PIN}
A, B = prompt(1, 4), prompt(2, 4)


@pytest.fixture
def open_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    return partial(cache_world, tmp_path, monkeypatch)


@pytest.fixture
def world(open_world: Open) -> Iterator[CacheWorld]:
    with open_world() as world:
        yield world


def named(select: Any, cache: Any, body: dict[str, Any]) -> Any:
    """What a selector returns for a body."""
    return calls.advance(cache, select(cache, body))[0]


class Caller:
    """Asks the tiers of a world as ``service`` asks a scheduler."""

    def __init__(self, world: CacheWorld) -> None:
        self.cache = world.cache
        self._step = world.cache.check_hicache_events
        self._control = Control()
        self._num_calls = 0

    def __call__(self, method: str, **body: Any) -> dict[str, Any]:
        self._num_calls += 1
        body = {"id": str(self._num_calls), **body}
        deadline = time.monotonic() + DEADLINE_S
        while True:
            answer = self._control.calls.answer(self.cache, method, body["id"], body)
            if answer.get("done", True):
                return answer
            assert time.monotonic() < deadline, answer
            if method in ("pin", "checkpoint"):
                body = {"id": body["id"]}
            self._step()
            time.sleep(0.0005)  # the threads need the interpreter too

    def pin(self, **body: Any) -> dict[str, Any]:
        return self("pin", now=time.time(), **body)

    def rows(self, **body: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self("conversations", **{"limit": 100, "after": {}, **body})[
            "conversations"
        ]
        return rows


@pytest.fixture
def ask(world: CacheWorld) -> Caller:
    return Caller(world)


def note(world: CacheWorld, rid: str, tokens: array[int], conversation: str | None = None) -> None:
    """A request's prefix gets into the tree."""
    world.compute(tokens)
    recents = world.cache.recent_requests
    recents.note_request(rid, PrefixSelector(tokens, None, None), NO_TENANT, conversation)


def test_id_selects_the_newest_of_its_tenant(world: CacheWorld) -> None:
    recents = world.cache.recent_requests
    other = tenant_digest("acme", None)
    for rid, tokens, key, tenant in (
        ("1", A, None, NO_TENANT), ("2", B, None, NO_TENANT), ("3", A, "acme", other),
    ):  # fmt: skip
        recents.note_request(rid, PrefixSelector(tokens, key, None), tenant, "chat")
    body = {"conversation_id": "chat"}
    assert named(prefix_of_body, world.cache, body).selector.tokens == B
    assert [each.selector.tokens for each in named(prefixes_of_body, world.cache, body)] == [B, A]
    (found,) = named(prefixes_of_body, world.cache, {**body, "extra_key": "acme"})
    assert found.selector.extra_key == "acme"
    assert named(prefix_of_body, world.cache, {**body, "cache_salt": "s"}) is None


def test_checkpoint_that_nobody_waits_for_is_not_begun(world: CacheWorld, ask: Caller) -> None:
    """Or those given up would keep the threads that the next ones need."""
    note(world, "1", A)
    assert ask("checkpoint", rid="1")["num_missing"] == 0
    hashes = world.cache.page_hashes(RadixKey(A, None))
    given = world.cache.storage, hashes, Tier.NVME, NO_TENANT
    assert conversations.make_durable(*given, -0.1) == 0
    assert conversations.make_durable(*given, 20.0) == len(hashes)


def test_pinned_id_is_found_after_a_restart(open_world: Open) -> None:
    with open_world() as world:
        ask = Caller(world)
        note(world, "1", A, "chat")
        answer = ask.pin(conversation_id="chat")
        assert (answer["name"], answer["num_tokens"], answer["num_missing"]) == ("chat", len(A), 0)
        note(world, "2", B, "other")
        assert ask.pin(rid="2", name="n", ttl=3600)["name"] == "n"
    with open_world() as world:
        ask = Caller(world)
        body = {"conversation_id": "chat"}
        assert named(prefix_of_body, world.cache, body).selector.tokens == A
        assert named(prefix_of_body, world.cache, {**body, "extra_key": "x"}) is None
        first, second = ask.rows()
        assert (first["id"], first["num_tokens"], first["nvme"]) == ("chat", len(A), len(A))
        (pin,) = first["pins"]
        assert (pin["name"], pin["tier"], pin["pinned_until"]) == ("chat", "nvme", None)
        assert second["id"] == "other" and second["pins"][0]["pinned_until"] > time.time()
        assert ask.rows(extra_key="acme") == []
        of_others: list[Any] = [{"conversation_id": "nobody"}, {"name": "n", "cache_salt": "s"}]
        for other in (*of_others, {"conversation_id": "other", "extra_key": "acme"}):
            assert ask("unpin", **other) == GONE
        assert ask("unpin", conversation_id="other") == {"done": True}
        assert ask("unpin", name="n") == GONE
        assert [row["id"] for row in ask.rows()] == ["chat"]


def test_unpin_takes_what_its_prefix_names(world: CacheWorld, ask: Caller) -> None:
    """Of its own tenant; and of a request the pin of its conversation too."""
    note(world, "1", A)
    note(world, "2", A + B, "chat")
    for name in ("mine", "its"):
        ask.pin(rid="1", name=name)
    ask.pin(rid="2", name="longer")
    assert ask("unpin", rid="1") == {"done": True}
    assert ask("unpin", name="mine") == ask("unpin", name="its") == GONE
    unaligned = [*(A + B), 7]
    assert ask("unpin", input_ids=unaligned, extra_key="acme") == GONE
    assert ask("unpin", input_ids=unaligned) == {"done": True}
    assert ask.pin(rid="2")["name"] == "chat"
    assert ask("unpin", rid="2") == {"done": True}
    assert [row["pins"] for row in ask.rows()] == [[], []]
    assert ask.rows(extra_key="acme") == []


def test_what_was_never_computed_is_not_pinned(world: CacheWorld, ask: Caller) -> None:
    assert ask.pin(input_ids=list(A)) == {"done": True, "unknown": conversations.NOTHING_HELD}
    assert ask.rows() == []
    world.compute(A[:PAGE])
    assert ask.pin(input_ids=list(A))["num_missing"] == len(A) - PAGE


def test_every_conversation_is_on_one_page(
    world: CacheWorld, ask: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix is matched in each step: the scheduler serves nobody meanwhile."""
    for number in range(7):
        note(world, f"r{number}", prompt(number, 2), f"chat {number}" if number % 2 else None)
    ask.pin(conversation_id="chat 5")
    for number in (20, 21, 22):
        world.compute(prompt(number, 1))
        ask.pin(input_ids=list(prompt(number, 1)), name=f"pin {number}")
    found: list[Any] = []
    page: dict[str, Any] = {"rank": 0, "next": ""}
    located, step = [0], ask._step  # in each step

    def count(*given: Any) -> Any:
        located[-1] += 1
        return locate(*given)

    monkeypatch.setattr(listing, "_STEP_TOKENS", PAGE)
    monkeypatch.setattr(listing, "locate", count)
    monkeypatch.setattr(ask, "_step", lambda: (located.append(0), step()))
    while page["next"] is not None:
        located.append(0)
        after = {str(page["rank"]): page["next"]} if page["next"] else {}
        page = ask("conversations", limit=3, after=after)
        assert len(page["conversations"]) <= 3
        found += [row["rid"] or row["pins"][0]["name"] for row in page["conversations"]]
    assert found == [f"r{number}" for number in range(6, -1, -1)] + ["pin 20", "pin 21", "pin 22"]
    assert (max(located), sum(located)) == (1, 10)
    assert page["pinned_bytes"] <= page["pin_bound_bytes"]
    assert page["pinned_bytes"] >= sum(pin["bytes"] for row in ask.rows() for pin in row["pins"])


@pytest.mark.parametrize(
    ("tier", "status"), [("nvme", 409), ("object", 409), ("nvme", 503)], ids=str
)
def test_refused_pin_keeps_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, status: int
) -> None:
    """Ranks pin, or none does (409), and the earlier pin of that name stays on all. What is still
    to be stored may fill the bound once all have asked (503)."""
    with cache_world(tmp_path / "1", monkeypatch, bucket=tmp_path / "bucket") as world:
        ask, told = Caller(world), list[int]()  # that this rank can
        note(world, "1", A, "chat")
        assert ask.pin(rid="1", tier=tier)["num_missing"] == 0
        keeper = keepers(world.cache.storage)[Tier(tier)]
        pinned, notes, asks = ask.rows()[0]["pins"], keeper.pin_notes(NO_TENANT), keeper.pin
        note(world, "2", A + B, "chat")

        def reduce(data: torch.Tensor, _: Any) -> None:
            if len(data) == 1:
                told.extend(data.tolist())
                data.fill_(0)

        def fills(*given: Any, only_asks: bool = False) -> Any:
            return asks(*given, only_asks=True) if only_asks else PinRefusal(1, 1, 1, "it is full")

        with monkeypatch.context() as refused:
            if status == 503:
                refused.setattr(keeper, "pin", fills)
            else:
                refused.setattr(world.cache, "_all_reduce_attn_groups", reduce)
            answer = ask.pin(rid="2", tier=tier)
        assert answer["status"] == status
        assert status == 503 or (told == [1] and "another rank" in answer["error"])
        assert ask.rows()[0]["pins"] == pinned
        assert keeper.pin_notes(NO_TENANT) == notes, "nothing was to be stored yet"
        assert ask.pin(rid="2", tier=tier)["num_tokens"] == len(A + B)


def test_failed_checkpoint_is_told_and_kept(
    world: CacheWorld, ask: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller would wait for the time to be up, for nothing."""

    def fail(*_: Any) -> int:
        raise OSError("a bucket that is closed")

    note(world, "1", A)
    with monkeypatch.context() as closed:
        closed.setattr(conversations, "make_durable", fail)
        with pytest.raises(OSError, match="closed"):
            ask("checkpoint", rid="1")
    assert ask("checkpoint", rid="1")["num_missing"] == 0, "its thread lives"


def test_bucket_keeps_what_is_pinned_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server of the bucket finds the conversation by its id, and may unpin it."""
    body = {"conversation_id": "chat"}
    with cache_world(tmp_path / "1", monkeypatch, bucket=tmp_path / "bucket") as world:
        ask = Caller(world)
        note(world, "1", A, "chat")
        answer = ask.pin(**body, tier="object")
        assert (answer["tier"], answer["num_missing"]) == ("object", 0)
        assert ask.pin(**body)["tier"] == "nvme"
        (row,) = ask.rows()
        assert sorted(pin["tier"] for pin in row["pins"]) == ["nvme", "object"]
        assert ask("unpin", **body) == {"done": True}
        assert [row["pins"] for row in ask.rows()] == [[]]
        ask.pin(**body, tier="object")
    with cache_world(tmp_path / "2", monkeypatch, bucket=tmp_path / "bucket") as world:
        ask = Caller(world)
        world.until(lambda: named(prefix_of_body, world.cache, body) is not None)
        assert named(prefix_of_body, world.cache, body).selector.tokens == A
        (row,) = ask.rows()
        assert [(pin["name"], pin["tier"]) for pin in row["pins"]] == [("chat", "object")]
        assert ask("unpin", name="chat") == {"done": True}
        assert ask.rows() == []


def test_forgotten_conversation_leaves_nothing_behind(world: CacheWorld, ask: Caller) -> None:
    """All its turns go, where each branched off, and what pins noted of it."""
    branches = [A + prompt(number, 2) for number in (5, 6)]
    for rid, tokens in (("1", A), ("2", branches[0]), ("3", branches[1])):
        note(world, rid, tokens, "chat")
        ask.pin(rid=rid, name=f"pin {rid}")
    note(world, "4", B, "other")
    answer = ask("forget", conversation_id="chat", keep_tokens=2 * PAGE)
    assert (answer["durable"], answer["num_tokens"]) == (True, (2 + 2 + 2) * PAGE)
    for tokens in branches:
        held = ask("residency", input_ids=list(tokens))
        assert held["device"] == held["host"] == 2 * PAGE
    assert named(prefix_of_body, world.cache, {"conversation_id": "chat"}) is None
    assert [row["id"] for row in ask.rows()] == ["other", None, None, None]
    assert [data for _, data in world.cache.storage.region_engine.pin_notes(NO_TENANT)] == [b""] * 3


def test_nothing_is_pinned_while_pages_have_no_names(
    world: CacheWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would answer 200 and keep none of them."""
    ask, storage = Caller(world), world.cache.storage
    note(world, "1", A, "chat")
    with monkeypatch.context() as reading:
        reading.setattr(storage, "_search", SimpleNamespace(answer=None))
        assert ask.pin(rid="1")["status"] == 503
    assert storage.region_engine.pins() == []
    assert ask.pin(rid="1")["num_missing"] == 0


# ---- Forgotten ----

HELD, OTHERS = prompt(1, 6), prompt(2, 2)


@pytest.fixture
def stored(world: CacheWorld) -> CacheWorld:
    world.store(HELD, OTHERS)
    world.compute(HELD)
    world.until(lambda: not world.cache.is_under_way())
    return world


def forgetter(world: CacheWorld, max_pages: int = MAX_KEYS) -> Callable[[str, Any], dict[str, Any]]:
    """Asks a scheduler to forget, once, by the number of the call."""
    begin = partial(conversations.forget, conversations.Forgets(max_pages))
    return partial(calls.Calls({"forget": begin}).answer, world.cache, "forget")


def held(world: CacheWorld, tokens: array[int]) -> tuple[int, int]:
    """Leading pages in memory, and on NVMe."""
    match = world.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None)))
    by_tier = Caller(world)("residency", input_ids=tokens.tolist())
    assert by_tier["device"] <= match.device_prefix_len
    return (match.device_prefix_len + match.host_hit_length) // PAGE, by_tier["nvme"] // PAGE


@pytest.mark.parametrize(("keep", "kept"), [(0, 0), (1, 1), (2 * PAGE, 2), (6 * PAGE, 6)])
def test_whole_pages_behind_what_is_kept_go(stored: CacheWorld, keep: int, kept: int) -> None:
    assert held(stored, HELD) == (6, 6)
    got = Caller(stored)("forget", input_ids=HELD.tolist(), keep_tokens=keep)
    assert got == {"done": True, "durable": True, "num_tokens": (6 - kept) * PAGE}
    assert held(stored, HELD) == (kept, kept)
    assert held(stored, OTHERS)[1] == 2


def test_neighbours_rid_is_unknown(stored: CacheWorld) -> None:
    """Clients choose rids, so one tenant may guess another's."""
    recents, keys = stored.cache.recent_requests, {"extra_key": "acme", "cache_salt": "s"}
    recents.note_request("r", PrefixSelector(HELD, None, None), NO_TENANT)
    unknown = {"done": True, "unknown": True}
    assert Caller(stored)("forget", rid="r", keep_tokens=0, **keys) == unknown
    assert Caller(stored)("residency", rid="r", cache_salt="s") == unknown
    recents.note_request("r", PrefixSelector(HELD, "acme", "s"), tenant_digest("acme", "s"))
    assert Caller(stored)("forget", rid="r", keep_tokens=0, extra_key="acme") == unknown
    assert Caller(stored)("forget", rid="r", keep_tokens=0, **keys)["num_tokens"] == 6 * PAGE


def test_too_many_pages_change_nothing(stored: CacheWorld) -> None:
    """Another tenant's would go for pages that never were."""
    ask = forgetter(stored, 7)
    everything = {"input_ids": HELD.tolist(), "keep_tokens": 0}
    assert "error" not in ask("m", {"hashes": ["ff" * 32] * 2})
    for number, body in (("o", everything), ("p", {"hashes": ["00" * 32] * 6})):
        got = ask(number, body)
        assert got["status"] == 503 and "or ask again after 3" in got["error"]
    got = ask("q", {"hashes": ["00" * 32] * 8})
    assert got["status"] == 503 and got["error"].endswith("use a purge of the tenant")
    assert held(stored, HELD) == (6, 6)
    assert "error" not in ask("r", {**everything, "keep_tokens": PAGE})


def test_asking_again_takes_no_other_tenants_allowance(stored: CacheWorld) -> None:
    """A server that is away makes each ask until it is back. That has a bound too."""
    ask, body = forgetter(stored, 7), {"hashes": [f"{page:064x}" for page in range(100, 103)]}
    for number in ("1", "2", "3"):
        assert "error" not in ask(number, body)
    assert "error" not in ask("other", {"hashes": [f"{page:064x}" for page in range(4)]})
    assert "or ask again after 3" in ask("4", body)["error"]


def test_an_hour_later_pages_are_new_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what was ever forgotten would be kept, and count as asked again."""
    clock, forgets = SimpleNamespace(monotonic=lambda: 0.0), conversations.Forgets(3)
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
    found = conversations._longest([*branches, *beginnings, other, other])
    assert time.process_time() - begun < 20, "pair by pair they take minutes"
    assert sorted(found, key=lambda one: (len(one.tokens), one.tokens[-1])) == [other, *branches]


def test_detached_tiers_do_not_answer_durable(stored: CacheWorld) -> None:
    assert stored.cache.detach_storage_backend()[0]
    got = Caller(stored)("forget", input_ids=HELD.tolist(), keep_tokens=0)
    assert got["status"] == 503 and got["error"] == calls.DETACHED
    match = stored.cache.match_prefix(MatchPrefixParams(key=RadixKey(HELD, None)))
    assert match.device_prefix_len == match.host_hit_length == 0


def test_pages_named_before_the_weights_are_known(
    stored: CacheWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names hold for every namespace, but a bucket needs to know which."""
    storage = stored.cache.storage
    told: list[Any] = []
    monkeypatch.setattr(storage, "_search", SimpleNamespace(answer=None))
    monkeypatch.setattr(storage.stack, "remote", {"bucket": None})
    monkeypatch.setattr(storage.stack, "erase", lambda what: told.append(what.keys) or ended(True))
    ask = forgetter(stored)
    got = ask("n", {"input_ids": HELD.tolist(), "keep_tokens": 0})
    assert not got["done"] and not told
    hashes = stored.cache.page_hashes(RadixKey(HELD, None))
    assert not any(storage.region_engine.contains([bytes.fromhex(each) for each in hashes]))
    storage._erase_late()
    stored.until(lambda: ask("n", {})["durable"])
    assert [len(keys) for keys in told] == [6]
    monkeypatch.undo()


def test_pages_named_after_a_purge_are_hidden(stored: CacheWorld) -> None:
    """A replica that knows no rid is told hashes, which are those of a marked key too."""
    cache = stored.cache
    hashes = cache.page_hashes(RadixKey(HELD, None))
    cache.hidden_tenants.quarantine(None)
    key = RadixKey(HELD, cache.hidden_tenants.key_of(None, None))
    cache.insert(InsertParams(key=key, value=stored.alloc(len(HELD))))
    assert cache.match_visible(key).device_prefix_len == len(HELD)
    Caller(stored)("forget", hashes=hashes[3:])
    assert cache.match_visible(key).device_prefix_len == 3 * PAGE


def test_no_stage_promises_for_the_others(stored: CacheWorld) -> None:
    """The first alone answers, and the disk of another may take nothing."""
    stored.cache.pp_size = 2
    body = {"input_ids": HELD.tolist()}
    begins = {"checkpoint": conversations.checkpoint, "pin": conversations.pin}
    for name in begins:
        got = calls.Calls(begins).answer(stored.cache, name, "n", {**body, "now": 0.0})
        assert got["status"] == 400 and "with --pp-size above 1" in got["error"]
    ask = forgetter(stored)
    ask("n", {**body, "keep_tokens": 0})
    stored.until(lambda: ask("n", {}).get("status") == 503)
    assert "nobody can tell that of the others" in ask("n", {})["error"]
    assert held(stored, HELD) == (0, 0)
