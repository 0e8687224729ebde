"""The id of a conversation on its way to the schedulers, through SGLang's own request types."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_tiered.integration.identity.conversation_ids import (
    MAX_ID_BYTES,
    after_tokenizing,
    conversation_of,
)

HINTS = KvHintsEnvelope(
    protocol_version="3",
    message_id="m",
    actions=[KvHintAction(action_id="a", action_type="other", action_version="2")],
)


def receive(hints: KvHintsEnvelope | None, **fields: Any) -> tuple[Req, KvHintsEnvelope | None]:
    """What a scheduler makes of a request: its hints have been over the wire."""
    tokenized: Any = SimpleNamespace(kv_hints=hints)
    request = GenerateReqInput(text="Hi", **fields)
    after_tokenizing(tokenized, request)
    sent = msgspec.msgpack.encode(tokenized.kv_hints)
    found = msgspec.msgpack.decode(sent, type=KvHintsEnvelope | None)
    made = Req(
        "rid", "", [1], SamplingParams(), kv_hints=found, session_id=fields.get("session_id")
    )
    return made, found


def test_id_reaches_a_schedulers_request() -> None:
    request, hints = receive(None, conversation_id="chat")
    assert conversation_of(request) == "chat"
    assert hints is not None and len(hints.actions) == 1


def test_hints_of_others_stay_as_they_were() -> None:
    request, hints = receive(HINTS, conversation_id="chat")
    assert conversation_of(request) == "chat"
    assert hints is not None
    assert (hints.protocol_version, hints.message_id) == ("3", "m")
    assert hints.actions[:1] == HINTS.actions
    request, hints = receive(HINTS)
    assert hints == HINTS and conversation_of(request) is None


@pytest.mark.parametrize("bad", ["", "x" * (MAX_ID_BYTES + 1), "\ud800", 7])
def test_unusable_id_never_fails_a_request(bad: Any) -> None:
    request, hints = receive(None, conversation_id=bad)
    assert (conversation_of(request), hints) == (None, None)


def test_session_id_serves_where_there_is_no_other() -> None:
    assert conversation_of(receive(None, session_id="s")[0]) == "s"
    assert conversation_of(receive(None, session_id="s", conversation_id="chat")[0]) == "chat"
