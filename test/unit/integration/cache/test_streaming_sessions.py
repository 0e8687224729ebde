"""Turns of streaming sessions: what the tree owns after each, every page once."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cache_world import PAGE, CacheWorld, hashes_of
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session.session_controller import Session

HISTORY = array("q", range(1, 20 * PAGE))


class Conversation:
    """A streaming session. Each turn has the history so far and one output token."""

    def __init__(self, world: CacheWorld) -> None:
        self.world, self.cache = world, world.cache
        self.session = Session(1 << 20, "s", streaming=True)

    def begin(self, end: int, key: str | None = None) -> Req:
        req = Req(f"turn-{end}", "", HISTORY[:end], SamplingParams(max_new_tokens=1), extra_key=key)
        req.session = self.session
        self.session._inflight = True
        self.world.admit(req, HISTORY[: end - 1], key)
        self.world.take_slots(req, req.prefix_len, end)
        self.cache.maybe_hand_to_session(req)
        self.cache.checkpoint(req, up_to=end)
        req.output_ids.append(int(HISTORY[end]))
        return req

    def end(self, req: Req) -> None:
        self.world.end(req)
        assert self.cache.session.slots["s"].kv.holds_kv

    def end_with_overlap(self, req: Req) -> None:
        """The next step was on its way already, and computed the KV of the output token."""
        self.world.take_slots(req, req.kv.kv_committed_len, req.kv.kv_committed_len + 1)
        self.end(req)

    def end_with_reserved(self, req: Req) -> None:
        """Slots for the tokens of a next verify step were reserved, and no such step was begun."""
        end = req.kv.kv_committed_len
        self.world.take_slots(req, end, aligned(end) + PAGE)
        req.kv.kv_committed_len = end
        self.end(req)

    def abort(self, req: Req) -> None:
        self.world.end(req, FINISH_ABORT())
        assert "s" not in self.cache.session.slots

    def num_published(self, end: int, key: str | None = None) -> int:
        return int(self.world.match(HISTORY[:end], key).device_prefix_len)

    def close(self) -> None:
        """Nothing of the session stays taken."""
        self.cache.release_session("s")
        self.world.check_owners()


def aligned(length: int) -> int:
    return length // PAGE * PAGE


@pytest.fixture
def talk(world: CacheWorld) -> Iterator[Conversation]:
    talk = Conversation(world)
    yield talk
    talk.close()


A, B = "one", "two"  # keys
END, ABORT = Conversation.end, Conversation.abort


def uncacheable(talk: Conversation, req: Req) -> None:
    req.skip_radix_cache_insert = True
    talk.end(req)


def retract(talk: Conversation, req: Req) -> None:
    assert talk.cache.claim_kv_row(req)


TURNS: dict[str, tuple[list[Any], dict[str | None, int]]] = {
    "finished": ([(40, None, END), (75, None, END), (123, None, END)], {None: 123}),
    "retracted": ([(40, None, END), (100, None, retract)], {None: 40}),
    "at its end": ([(40, None, END), (100, None, retract), (101, None, END)], {None: 101}),
    "aborted": ([(75, None, END), (150, None, ABORT)], {None: 150}),
    "after abort": ([(75, None, END), (150, None, ABORT), (160, None, END)], {None: 160}),
    "another's turn": ([(40, A, END), (75, B, END), (150, A, END)], {A: 40, B: 0}),
    "uncacheable": ([(40, A, END), (75, A, uncacheable), (150, A, END)], {A: 40}),
    "aborted by another": ([(75, A, END), (150, B, ABORT)], {A: 75, B: 0}),
    "abort after another's": ([(40, A, END), (75, B, END), (150, A, ABORT)], {A: 40, B: 0}),
    "abort after uncacheable": ([(40, A, END), (75, A, uncacheable), (150, A, ABORT)], {A: 40}),
    "abort after retraction": ([(40, A, END), (75, B, retract), (150, A, ABORT)], {A: 40}),
}


@pytest.mark.parametrize(("turns", "published"), TURNS.values(), ids=TURNS)
def test_turns_publish_only_what_is_theirs(
    talk: Conversation,
    turns: list[tuple[int, str | None, Callable[..., None]]],
    published: dict[str | None, int],
) -> None:
    """Another adapter may have computed a turn; or a tenant was purged."""
    for end, key, conclude in turns:
        conclude(talk, talk.begin(end, key))
    assert {key: talk.num_published(end, key) for key in published} == {
        key: aligned(number) for key, number in published.items()
    }


def test_a_turn_computed_twice_has_one_owner(talk: Conversation) -> None:
    talk.end(talk.begin(40))
    turn = talk.begin(100)
    talk.world.compute(HISTORY[: aligned(100)])
    talk.end(turn)
    row = talk.cache.req_to_token_pool.req_to_token[talk.cache.session.slots["s"].kv.req_pool_idx]
    path = talk.cache.path_device_indices(talk.world.match(HISTORY[:100]).last_device_node)
    assert row[: aligned(100)].tolist() == path.tolist()


def recompute(talk: Conversation, key: str | None = None) -> None:
    """A turn begins anew, and the next one has all of it."""
    turn = talk.begin(150, key)
    assert turn.prefix_len == 0
    talk.end(turn)
    turn = talk.begin(200, key)
    assert turn.prefix_len == 150, "what was computed again was dropped"
    talk.end(turn)


def test_forgotten_turns_are_computed_again(talk: Conversation) -> None:
    """A session's record holds them beside the tree."""
    talk.end(talk.begin(75))
    turn = talk.begin(100)
    talk.cache.hidden_pages.hide(hashes_of(HISTORY[: 4 * PAGE]))
    talk.end(turn)  # which was under way
    assert talk.num_published(100) == 0
    recompute(talk)
    assert talk.num_published(200) == aligned(200)


def test_turns_before_a_quarantine_are_computed_again(talk: Conversation) -> None:
    """A later turn goes by a marked key, and the record is none of what is hidden."""
    purged = talk.cache.hidden_tenants
    talk.end(talk.begin(75, "one"))
    turn = talk.begin(100, "one")
    purged.quarantine(None)
    talk.end(turn)  # which was under way
    recompute(talk, purged.key_of("one", None))


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


def test_turns_without_input_do_not_shrink_the_prefix(talk: Conversation) -> None:
    """The last token of a prompt is computed again, and a session's prefix must not shrink."""
    for end in range(2 * PAGE - 2, 2 * PAGE + 2):
        talk.end_with_overlap(talk.begin(end))
    assert talk.num_published(end + 1) == aligned(end)


@pytest.mark.parametrize("has_window", [False, True])
def test_a_turn_computes_an_unverified_token(
    open_world: Callable[..., CacheWorld], *, has_window: bool
) -> None:
    """A verify step may not have begun when a turn ends, and the last token's slot is reserved."""
    talk = Conversation(open_world(has_window=has_window))
    talk.end_with_reserved(talk.begin(40))
    turn = talk.begin(75)
    assert turn.prefix_len == 40
    talk.abort(turn)  # and all of it is published
    assert talk.num_published(75) == aligned(75)
    talk.close()


def test_an_empty_turn_after_no_answer_begins_anew(talk: Conversation) -> None:
    """Its last token is the tree's, which it must not compute again in place."""
    talk.world.end(talk.begin(2 * PAGE), num_output=0)
    turn = talk.begin(2 * PAGE)
    assert turn.prefix_len == PAGE  # by the tree
    talk.end(turn)
    talk.end(talk.begin(75))
    assert talk.num_published(75) == aligned(75)


def test_a_sessions_own_pages_are_no_tree_node(talk: Conversation) -> None:
    """SGLang looks for more below them when a turn comes, and the tree knows no such node."""
    talk.end(talk.begin(40))
    turn = talk.begin(75)
    assert not talk.cache.is_backuped(turn.last_host_node)
    assert not talk.cache.is_root(turn.last_host_node)
    talk.end(turn)


def test_with_windows_only_the_first_key_publishes_aborts(
    open_world: Callable[..., CacheWorld],
) -> None:
    """SGLang's own way, where the states of a finished turn are those of the next."""
    world = open_world(has_window=True)
    for key, num_published in ((A, aligned(150)), (B, 0)):
        talk = Conversation(world)
        talk.end(talk.begin(75, A))
        talk.end(talk.begin(110, A))
        talk.abort(talk.begin(150, key))
        assert talk.num_published(150, key) == num_published
        talk.close()
        world.cache.reset()
        world.allocator.clear()
