"""Turns of streaming sessions over SGLang's own sessions, tree and pools: what the tree owns after
each, and that no page is owned twice or by nobody."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import pytest
from cache_world import PAGE, CacheWorld, cache_world
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session.session_controller import Session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HISTORY = array("q", range(1, 20 * PAGE))


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Conversation]:
    with cache_world(tmp_path / "kv", monkeypatch) as world:
        yield Conversation(world)


class Conversation:
    """What the scheduler does for the turns of one streaming session. Each turn has the history so
    far and one output token."""

    def __init__(self, world: CacheWorld) -> None:
        self.world, self.cache = world, world.cache
        self.session = Session(1 << 20, "s", streaming=True)

    def begin(self, end: int, key: str | None = None) -> Req:
        req = Req(f"turn-{end}", "", HISTORY[:end], SamplingParams(max_new_tokens=1), extra_key=key)
        req.session = self.session
        self.session._inflight = True
        req.refresh_fill_ids()
        match = self.match(HISTORY[: end - 1], key, req)
        req.last_node, req.prefix_len = match.last_device_node, match.device_prefix_len
        req.last_host_node = match.last_host_node
        req.lock = self.cache.lock(req.last_node)
        pool = self.cache.req_to_token_pool
        if not req.kv.holds_kv:
            pool.alloc([req])
            held = self.cache.path_device_indices(req.last_node)
            pool.write((req.kv.req_pool_idx, slice(0, len(held))), held)
            req.kv.cache_protected_len = req.kv.kv_allocated_len = len(held)
        row = pool.req_to_token[req.kv.req_pool_idx]
        start = -(-req.prefix_len // PAGE) * PAGE
        # The record's last page is filled first, then there are new ones.
        for position in range(req.prefix_len, min(start, end)):
            row[position] = row[position - 1] + 1
        if end > start:
            num_slots = -(-(end - start) // PAGE) * PAGE
            row[start:end] = self.world.alloc(num_slots)[: end - start]
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end
        self.cache.maybe_hand_to_session(req)
        self.cache.checkpoint(req, up_to=end)
        req.output_ids.append(int(HISTORY[end]))
        return req

    def end(self, req: Req) -> None:
        req.finished_reason = FINISH_LENGTH(length=1)
        req.finished_len = 1
        release_kv_cache(req, self.cache, checkpoint=True)
        assert self.cache.session.slots["s"].kv.holds_kv

    def end_with_overlap(self, req: Req) -> None:
        """The next step was on its way already, and computed the KV of the output token."""
        pool, kv, end = self.cache.req_to_token_pool, req.kv, req.kv.kv_committed_len
        row = pool.req_to_token[kv.req_pool_idx]
        row[end] = row[end - 1] + 1 if end % PAGE else self.world.alloc(PAGE)[0]
        kv.kv_allocated_len = kv.kv_committed_len = end + 1
        self.end(req)

    def end_with_reserved(self, req: Req) -> None:
        """Slots for the tokens of a next verify step were reserved, and no such step was begun."""
        pool, kv, end = self.cache.req_to_token_pool, req.kv, req.kv.kv_committed_len
        row = pool.req_to_token[kv.req_pool_idx]
        for position in range(end, aligned(end) + PAGE):
            row[position] = row[position - 1] + 1
        kv.kv_allocated_len = aligned(end) + PAGE
        self.end(req)

    def end_without_answer(self, req: Req) -> None:
        req.finished_reason, req.finished_len = FINISH_LENGTH(length=0), 0
        release_kv_cache(req, self.cache, checkpoint=True)

    def abort(self, req: Req) -> None:
        req.finished_reason = FINISH_ABORT()
        release_kv_cache(req, self.cache, checkpoint=True)
        assert "s" not in self.cache.session.slots

    def match(self, tokens: array[int], key: str | None = None, req: Req | None = None) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, key), req=req))

    def num_published(self, end: int, key: str | None = None) -> int:
        return int(self.match(HISTORY[:end], key).device_prefix_len)

    def close(self) -> None:
        """Nothing of the session stays taken, and every slot of the device has one owner."""
        self.world.wait_for_copies()
        self.world.until(lambda: not self.cache.ongoing_backup)
        self.cache.release_session("s")
        assert self.cache.protected_size() == 0
        allocator = self.world.allocator
        owned = self.cache.all_values_flatten()
        assert len(set(owned.tolist())) == len(owned)
        assert allocator.available_size() + len(owned) == allocator.size_full
        self.cache.sanity_check()


def aligned(length: int) -> int:
    return length // PAGE * PAGE


def test_each_finished_turn_is_anyones_prefix(talk: Conversation) -> None:
    for end in (40, 75, 3 * PAGE + 75, 200):
        talk.end(talk.begin(end))
        assert talk.num_published(end) == aligned(end)
    slot = talk.cache.session.slots["s"]
    assert slot.kv.cache_protected_len == aligned(200)
    talk.close()


def test_a_turn_computed_twice_has_one_owner(talk: Conversation) -> None:
    talk.end(talk.begin(40))
    turn = talk.begin(100)
    talk.world.compute(HISTORY[: aligned(100)])
    talk.end(turn)
    row = talk.cache.req_to_token_pool.req_to_token[talk.cache.session.slots["s"].kv.req_pool_idx]
    path = talk.cache.path_device_indices(talk.match(HISTORY[:100]).last_device_node)
    assert row[: aligned(100)].tolist() == path.tolist()
    talk.close()


def test_a_turn_by_another_key_stays_unpublished(talk: Conversation) -> None:
    """Another adapter may have computed it; or a tenant was purged, and must not be found again."""
    talk.end(talk.begin(40, "one"))
    talk.end(talk.begin(75, "two"))
    talk.end(talk.begin(150, "one"))
    assert talk.num_published(150, "one") == aligned(40)
    assert talk.num_published(150, "two") == 0
    talk.close()


def test_no_later_turn_publishes_an_uncacheable_one(
    talk: Conversation,
) -> None:
    talk.end(talk.begin(40))
    turn = talk.begin(75)
    turn.skip_radix_cache_insert = True
    talk.end(turn)
    talk.end(talk.begin(150))
    assert talk.num_published(150) == aligned(40)
    talk.close()


def test_a_retracted_turn_is_published_at_its_end(
    talk: Conversation,
) -> None:
    talk.end(talk.begin(40))
    turn = talk.begin(100)
    assert talk.cache.claim_kv_row(turn)
    assert talk.num_published(100) == aligned(40)
    talk.end(talk.begin(101))
    assert talk.num_published(101) == aligned(101)
    talk.close()


def test_forgotten_turns_are_computed_again(talk: Conversation) -> None:
    """A session's record holds them beside the tree."""
    hashes = get_storage_hash_str(RadixKey(HISTORY[: 4 * PAGE]), None, page_size=PAGE)
    talk.end(talk.begin(75))
    turn = talk.begin(100)
    talk.cache.hidden_pages.hide(hashes)
    talk.end(turn)  # which was under way
    assert talk.num_published(100) == 0
    turn = talk.begin(150)
    assert turn.prefix_len == 0
    talk.end(turn)
    assert talk.num_published(150) == aligned(150)
    turn = talk.begin(200)
    assert turn.prefix_len == 150, "what was computed again was dropped"
    talk.end(turn)
    talk.close()


def test_turns_before_a_quarantine_are_computed_again(talk: Conversation) -> None:
    """A later turn goes by a marked key, and the record is none of what is hidden."""
    purged = talk.cache.hidden_tenants
    talk.end(talk.begin(75, "one"))
    turn = talk.begin(100, "one")
    purged.quarantine(None)
    talk.end(turn)  # which was under way
    key = purged.key_of("one", None)
    turn = talk.begin(150, key)
    assert turn.prefix_len == 0
    talk.end(turn)
    turn = talk.begin(200, key)
    assert turn.prefix_len == 150, "what was computed again was dropped"
    talk.end(turn)
    talk.close()


@pytest.mark.parametrize("later", ["one", "two"])
def test_mixed_turns_before_a_quarantine_are_dropped(talk: Conversation, later: str) -> None:
    """Such a record is never published, and no one key stands for it."""
    purged = talk.cache.hidden_tenants
    talk.end(talk.begin(75, "one"))
    talk.end(talk.begin(100, "two"))
    purged.quarantine(None)
    turn = talk.begin(150, purged.key_of(later, None))
    assert turn.prefix_len == 0
    talk.end(turn)
    talk.close()


def test_turns_without_input_do_not_shrink_the_prefix(
    talk: Conversation,
) -> None:
    """The last token of a prompt is computed again, and a session's prefix must not shrink."""
    for end in range(2 * PAGE - 2, 2 * PAGE + 2):
        talk.end_with_overlap(talk.begin(end))
    assert talk.num_published(end + 1) == aligned(end)
    talk.close()


@pytest.mark.parametrize("has_window", [False, True])
def test_a_turn_computes_an_unverified_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_window: bool
) -> None:
    """A verify step may not have begun when a turn ends, and the last token's slot is reserved."""
    with cache_world(tmp_path / "kv", monkeypatch, has_window=has_window) as world:
        talk = Conversation(world)
        talk.end_with_reserved(talk.begin(40))
        turn = talk.begin(75)
        assert turn.prefix_len == 40
        talk.abort(turn)  # and all of it is published
        assert talk.num_published(75) == aligned(75)
        talk.close()


def test_an_empty_turn_after_no_answer_begins_anew(
    talk: Conversation,
) -> None:
    """Its last token is the tree's, which it must not compute again in place."""
    talk.end_without_answer(talk.begin(2 * PAGE))
    turn = talk.begin(2 * PAGE)
    assert turn.prefix_len == PAGE  # by the tree
    talk.end(turn)
    talk.end(talk.begin(75))
    assert talk.num_published(75) == aligned(75)
    talk.close()


def test_a_turn_without_news_is_found_by_id(talk: Conversation) -> None:
    talk.end_with_overlap(talk.begin(2 * PAGE))
    turn = talk.begin(2 * PAGE + 1)
    talk.end_without_answer(turn)
    recent = talk.cache.recent_requests.find(turn.rid)
    assert recent is not None
    assert aligned(len(recent.selector.tokens)) == 2 * PAGE
    talk.close()


def test_an_aborted_turn_is_anyones_prefix(talk: Conversation) -> None:
    talk.end(talk.begin(75))
    talk.abort(talk.begin(150))
    assert talk.num_published(150) == aligned(150)
    talk.end(talk.begin(160))
    assert talk.num_published(160) == aligned(160)
    talk.close()


def test_an_aborted_turn_by_another_key_stays_unpublished(talk: Conversation) -> None:
    talk.end(talk.begin(75, "one"))
    talk.abort(talk.begin(150, "two"))
    assert talk.num_published(150, "one") == aligned(75)
    assert talk.num_published(150, "two") == 0
    talk.close()


def test_with_windows_only_the_first_key_publishes_aborts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own way, where finished turns are not published."""
    with cache_world(tmp_path / "kv", monkeypatch, has_window=True) as world:
        for key, num_published in (("one", aligned(150)), ("two", 0)):
            talk = Conversation(world)
            talk.end(talk.begin(75, "one"))
            talk.end(talk.begin(110, "one"))
            talk.abort(talk.begin(150, key))
            assert talk.num_published(150, key) == num_published
            talk.close()
            world.cache.reset()
            world.allocator.clear()


def test_an_abort_does_not_publish_another_keys_turn(
    talk: Conversation,
) -> None:
    talk.end(talk.begin(40, "one"))
    talk.end(talk.begin(75, "two"))
    talk.abort(talk.begin(150, "one"))
    assert talk.num_published(150, "one") == aligned(40)
    assert talk.num_published(150, "two") == 0
    talk.close()


def test_an_abort_does_not_publish_an_uncacheable_turn(
    talk: Conversation,
) -> None:
    talk.end(talk.begin(40))
    turn = talk.begin(75)
    turn.skip_radix_cache_insert = True
    talk.end(turn)
    talk.abort(talk.begin(150))
    assert talk.num_published(150) == aligned(40)
    talk.close()


def test_an_abort_does_not_publish_another_keys_retraction(
    talk: Conversation,
) -> None:
    talk.end(talk.begin(40, "one"))
    assert talk.cache.claim_kv_row(talk.begin(75, "two"))
    talk.abort(talk.begin(150, "one"))
    assert talk.num_published(150, "one") == aligned(40)
    talk.close()


def test_a_sessions_own_pages_are_no_tree_node(talk: Conversation) -> None:
    """SGLang looks for more below them when a turn comes, and the tree knows no such node."""
    talk.end(talk.begin(40))
    turn = talk.begin(75)
    assert not talk.cache.is_backuped(turn.last_host_node)
    assert not talk.cache.is_root(turn.last_host_node)
    talk.end(turn)
    talk.close()
