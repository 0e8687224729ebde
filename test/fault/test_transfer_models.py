"""KV of one model is noise to another: a pair of unequal ones hands nothing over."""

from __future__ import annotations

import pytest
from transfer_pair import HOST, MODEL, Decode, Prefill, decode, hand_over, prefill

from sglang_tiered.transfer.messages import TOKENS_BYTES, Asked, is_other_model, is_other_prompt

OTHER = b"o" * 32
ADAPTER = b"a" * 32
PROMPT = bytes(range(TOKENS_BYTES))
SENTENCE = (
    f"prefill at {HOST}:30000 has the model {MODEL.hex()[:16]} and decode at {HOST}:30001 "
    f"the model {OTHER.hex()[:16]}, whose KV differs; "
)


def open_room(sender: Prefill, receiver: Decode, room: int = 1) -> None:
    sender.endpoint.expect_room(room)
    receiver.open(room, [sender], [1, 2])


def reasons(sender: Prefill, receiver: Decode, room: int = 1) -> list[str]:
    return [end.events.wait_for("failed", room)[2] for end in (sender, receiver)]


def test_other_model_is_refused_on_both_sides() -> None:
    with prefill() as sender, decode(model=OTHER) as receiver:
        open_room(sender, receiver)
        for reason in reasons(sender, receiver):
            assert SENTENCE in reason and "--transfer-model" in reason
        assert not receiver.pool.kv.any(), "something landed"


def test_claim_of_other_model_ends_the_request() -> None:
    """Prefill need not compute what nobody takes, though decode has no memory yet."""
    with prefill() as sender, decode(model=OTHER) as receiver:
        sender.endpoint.expect_room(1)
        receiver.claim(1, [sender])
        assert SENTENCE in sender.events.wait_for("failed", 1)[2]
        receiver.open(1, [sender], [1, 2])
        assert SENTENCE in receiver.events.wait_for("failed", 1)[2]


def test_requests_wait_until_both_models_are_known() -> None:
    with prefill(model=None) as sender, decode(model=None) as receiver:
        sender.endpoint.expect_room(1)
        receiver.claim(1, [sender])
        receiver.open(1, [sender], [1, 2])
        receiver.endpoint.set_model(MODEL)
        sender.endpoint.expect_room(2)
        receiver.open(2, [sender], [3, 4])  # a session is open by then
        assert sender.events.kinds(1) == []
        sender.endpoint.set_model(MODEL)
        for room, pages in ((1, [1, 2]), (2, [3, 4])):
            sender.events.wait_for("ready", room)
            sender.send(room, [8, 9])
            receiver.events.wait_for("received", room)
            assert (receiver.pool.pages(pages) == sender.pool.pages([8, 9])).all()


def both_ask(
    sender: Prefill, receiver: Decode, room: int, ours: Asked, theirs: Asked, *, is_claimed: bool
) -> None:
    """``is_claimed``: decode asks first."""
    if not is_claimed:
        sender.endpoint.expect_room(room, ours)
    receiver.open(room, [sender], [1, 2], asked=theirs)
    if is_claimed:
        sender.endpoint.expect_room(room, ours)


@pytest.mark.parametrize("is_claimed", [False, True])
def test_other_adapter_is_another_model(is_claimed: bool) -> None:
    ours = Asked(ADAPTER)
    with prefill() as sender, decode() as receiver:
        both_ask(sender, receiver, 1, ours, ours, is_claimed=is_claimed)
        sender.events.wait_for("ready", 1)
        for room, adapter in ((2, OTHER), (3, b"")):
            both_ask(sender, receiver, room, ours, Asked(adapter), is_claimed=is_claimed)
            assert all("whose KV differs" in told for told in reasons(sender, receiver, room))


@pytest.mark.parametrize("is_claimed", [False, True])
@pytest.mark.parametrize("adapter", [b"", ADAPTER])
def test_other_tokens_are_refused_on_both_sides(adapter: bytes, is_claimed: bool) -> None:
    """A number that two requests share: KV of one prompt answered the other, and was filed so."""
    ours = Asked(adapter, PROMPT)
    with prefill() as sender, decode() as receiver:
        both_ask(sender, receiver, 1, ours, ours, is_claimed=is_claimed)
        sender.events.wait_for("ready", 1)
        for room, prompt in ((2, bytes(TOKENS_BYTES)), (3, PROMPT[::-1])):
            both_ask(sender, receiver, room, ours, Asked(adapter, prompt), is_claimed=is_claimed)
            for told in reasons(sender, receiver, room):
                assert is_other_prompt(told) and not is_other_model(told)
                assert f"prefill at {HOST}:30000 and decode at {HOST}:30001" in told


def test_other_model_is_named_before_other_tokens() -> None:
    with prefill() as sender, decode(model=OTHER) as receiver:
        sender.endpoint.expect_room(1, Asked(tokens=PROMPT))
        receiver.open(1, [sender], [1, 2], asked=Asked(tokens=PROMPT[::-1]))
        assert all(SENTENCE in told for told in reasons(sender, receiver))


def test_late_answer_refuses_rooms_that_waited() -> None:
    with prefill(model=None) as sender, decode(model=OTHER) as receiver:
        open_room(sender, receiver)
        sender.endpoint.set_model(MODEL)
        assert all(SENTENCE in reason for reason in reasons(sender, receiver))


def test_prefill_hears_of_rooms_closed_meanwhile() -> None:
    """Prefill had the claim, and waited for the rest until SGLang gave the request up."""
    with prefill() as sender, decode(model=None) as receiver:
        sender.endpoint.expect_room(1)
        receiver.claim(1, [sender])
        receiver.open(1, [sender], [1, 2])
        receiver.endpoint.close_room(1)
        receiver.endpoint.set_model(MODEL)
        assert "dropped it: the request ended" in sender.events.wait_for("failed", 1)[2]


def test_rooms_under_way_end_with_prefills_update() -> None:
    with prefill() as sender, decode() as receiver:
        open_room(sender, receiver)
        sender.events.wait_for("ready", 1)
        sender.send(1, [8], is_last=False)
        sender.endpoint.fail_rooms("the weights changed")
        sender.endpoint.set_model(OTHER)
        sender.send(1, [9], start=1)  # computed with the weights after
        assert all("the weights changed" in reason for reason in reasons(sender, receiver))
        open_room(sender, receiver, 2)
        assert all("whose KV differs" in reason for reason in reasons(sender, receiver, 2))
        receiver.endpoint.set_model(OTHER)
        hand_over(sender, receiver, 3)


def test_rooms_after_decodes_update_are_refused() -> None:
    """Decode was updated; prefill was not."""
    with prefill() as sender, decode() as receiver:
        hand_over(sender, receiver, 1)
        receiver.endpoint.set_model(OTHER)
        open_room(sender, receiver, 2)
        assert all(SENTENCE in reason for reason in reasons(sender, receiver, 2))


def test_note_of_prefill_reaches_both_sides() -> None:
    with prefill() as sender, decode(model=OTHER) as receiver:
        sender.endpoint.set_model(MODEL, "its weights are in no file")
        open_room(sender, receiver)
        for reason in reasons(sender, receiver):
            assert "--transfer-model (its weights are in no file)" in reason
