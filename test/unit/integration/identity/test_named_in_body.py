"""What a body names reaches the request, whichever endpoint read it, or is refused with 400."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from sglang.srt.entrypoints.ollama.protocol import OllamaChatRequest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.managers.kv_hints import KvHintsEnvelope
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_tiered.integration.identity.conversation_ids import (
    MAX_ID_BYTES,
    after_tokenizing,
    conversation_of,
)
from sglang_tiered.integration.identity.named_in_body import BodyRefused, carry, take_overrides

NAMES = ("extra_key", "cache_salt", "session_id", "conversation_id", "rid")
MADE: dict[str, Any] = {"request": None}


@pytest.fixture(scope="module")
def client() -> TestClient:
    """An application that reads bodies as SGLang's does and drops what its model lacks."""
    app = FastAPI()

    async def endpoint(request: OllamaChatRequest, raw_request: Request) -> dict[str, Any]:
        made = MADE["request"]
        take_overrides(made, raw_request)
        carry(made, raw_request)
        return {name: getattr(made, name, None) for name in NAMES}

    endpoint.__annotations__ = {"request": OllamaChatRequest, "raw_request": Request}
    app.post("/")(endpoint)
    return TestClient(app)


def ask(client: TestClient, made: Any, **names: Any) -> tuple[int, dict[str, Any]]:
    MADE["request"] = made
    body = {"model": "m", "messages": [], **names}
    answer = client.post("/", json=body)
    return answer.status_code, answer.json()


def test_names_that_an_endpoint_drops_are_carried(client: TestClient) -> None:
    names = {name: f"of {name}" for name in NAMES}
    assert ask(client, GenerateReqInput(text="Hi"), **names) == (200, names)


def test_names_that_an_endpoint_knows_stay(client: TestClient) -> None:
    made = GenerateReqInput(text="Hi", cache_salt="mine", rid="r")
    status, found = ask(client, made, cache_salt="other", rid="other", session_id="s")
    assert (status, found["cache_salt"], found["rid"]) == (200, "mine", "r")
    assert found["session_id"] == "s"


@pytest.mark.parametrize(
    ("made", "names", "part"),
    [
        (EmbeddingReqInput(text="Hi"), {"cache_salt": "s"}, "cache_salt cannot separate"),
        (EmbeddingReqInput(text="Hi"), {"extra_key": "s"}, "extra_key cannot separate"),
        (GenerateReqInput(text="Hi"), {"cache_salt": 5}, "cache_salt is 5, not a text"),
        (GenerateReqInput(text="Hi"), {"instances": [{"cache_salt": "s"}]}, "in parameters"),
    ],
)
def test_tenant_that_cannot_be_kept_apart_is_refused(
    client: TestClient, made: Any, names: dict[str, Any], part: str
) -> None:
    status, answer = ask(client, made, **names)
    assert status == 400
    assert part in answer["detail"]
    assert isinstance(BodyRefused("x"), ValueError) and str(BodyRefused("x")) == "x"


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


@pytest.mark.parametrize("bad", ["", "x" * (MAX_ID_BYTES + 1), "\ud800", 7])
def test_unusable_id_never_fails_a_request(bad: Any) -> None:
    request, hints = receive(None, conversation_id=bad)
    assert (conversation_of(request), hints) == (None, None)
