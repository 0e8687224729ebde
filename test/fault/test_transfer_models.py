"""KV of one model is noise to another: a pair of unequal ones hands nothing over."""

from __future__ import annotations

from typing import Any

import pytest
from transfer_pair import MODEL, Decode, Prefill, decode, hand_over, prefill

from sglang_tiered.transfer.messages import TOKENS_BYTES, Asked, is_other_model, is_other_prompt

OTHER, ADAPTER, PROMPT = b"o" * 32, b"a" * 32, bytes(range(TOKENS_BYTES))
OURS = Asked(ADAPTER, PROMPT)
UNEQUAL: dict[str, tuple[bytes, Asked]] = {  # what decode has, while prefill has MODEL and OURS
    "model": (OTHER, OURS),
    "model and tokens": (OTHER, Asked(ADAPTER, PROMPT[::-1])),
    "adapter": (MODEL, Asked(OTHER, PROMPT)),
    "no adapter": (MODEL, Asked(b"", PROMPT)),
    "tokens": (MODEL, Asked(ADAPTER, PROMPT[::-1])),
}


def open_room(sender: Prefill, receiver: Decode, room: int = 1, **more: Any) -> None:
    sender.endpoint.expect_room(room)
    receiver.open(room, [sender], [1, 2], **more)


def reasons(sender: Prefill, receiver: Decode, room: int = 1) -> list[str]:
    return [end.events.wait_for("failed", room)[2] for end in (sender, receiver)]


@pytest.mark.parametrize("is_claimed", [False, True])
@pytest.mark.parametrize("what", UNEQUAL)
def test_unequal_halves_are_refused_on_both_sides(what: str, is_claimed: bool) -> None:
    """``is_claimed``: decode asks first. A number that two requests shared answered one with the
    KV of the other's prompt."""
    model, asked = UNEQUAL[what]
    with prefill() as sender, decode(model=model) as receiver:
        if not is_claimed:
            sender.endpoint.expect_room(1, OURS)
        receiver.open(1, [sender], [1, 2], asked=asked)
        if is_claimed:
            sender.endpoint.expect_room(1, OURS)
        for told in reasons(sender, receiver):
            assert is_other_prompt(told) == (what == "tokens") != is_other_model(told)
        assert not receiver.pool.kv.any(), "something landed"


def test_equal_adapters_and_tokens_are_served() -> None:
    with prefill() as sender, decode() as receiver:
        sender.endpoint.expect_room(1, OURS)
        receiver.open(1, [sender], [1, 2], asked=OURS)
        sender.events.wait_for("ready", 1)


@pytest.mark.parametrize("model", [MODEL, OTHER], ids=["same", "other"])
def test_requests_wait_until_both_models_are_known(model: bytes) -> None:
    with prefill(model=None) as sender, decode(model=None) as receiver:
        sender.endpoint.expect_room(1)
        receiver.claim(1, [sender])
        receiver.open(1, [sender], [1, 2])
        receiver.endpoint.set_model(model)
        open_room(sender, receiver, 2)  # a session is open by then
        assert sender.events.kinds(1) == []
        sender.endpoint.set_model(MODEL)
        if model == OTHER:
            assert all(
                map(is_other_model, reasons(sender, receiver) + reasons(sender, receiver, 2))
            )
            return
        for room in (1, 2):
            sender.events.wait_for("ready", room)
            sender.send(room, [8, 9])
            receiver.events.wait_for("done", room)
            assert (receiver.pool.pages([1, 2]) == sender.pool.pages([8, 9])).all()


def test_prefill_hears_of_rooms_closed_meanwhile() -> None:
    """Prefill had the claim, and waited for the rest until SGLang gave the request up."""
    with prefill() as sender, decode(model=None) as receiver:
        sender.endpoint.expect_room(1)
        receiver.claim(1, [sender])
        receiver.open(1, [sender], [1, 2])
        receiver.endpoint.close_room(1)
        receiver.endpoint.set_model(MODEL)
        assert "dropped it: the request ended" in sender.events.wait_for("failed", 1)[2]


def test_rooms_end_with_an_update_of_either() -> None:
    with prefill() as sender, decode() as receiver:
        open_room(sender, receiver)
        sender.events.wait_for("ready", 1)
        sender.send(1, [8], is_last=False)
        sender.endpoint.fail_rooms("the weights changed")
        sender.endpoint.set_model(OTHER)
        sender.send(1, [9], start=1)  # computed with the weights after
        assert all("the weights changed" in reason for reason in reasons(sender, receiver))
        open_room(sender, receiver, 2)
        assert all(map(is_other_model, reasons(sender, receiver, 2)))
        receiver.endpoint.set_model(OTHER)
        hand_over(sender, receiver, 3)
        receiver.endpoint.set_model(MODEL)
        open_room(sender, receiver, 4)
        assert all(map(is_other_model, reasons(sender, receiver, 4)))
