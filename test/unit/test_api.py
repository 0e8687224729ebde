"""What the calls take, and what a client sends: anything else is refused with one sentence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang_tiered import api
from sglang_tiered.api import (
    CallError,
    CheckpointCall,
    ConversationsCall,
    ForgetCall,
    PinCall,
    PrefetchCall,
    PurgeCall,
    RequestsCall,
    TenantsCall,
    UnpinCall,
    decode,
)
from sglang_tiered.client.calls import Request, SyncCalls

TENANT = {"extra_key": "acme", "cache_salt": "s"}
SELECTORS: list[dict[str, Any]] = [
    {"rid": "r"},
    {"conversation_id": "c", **TENANT},
    {"text": "t", "extra_key": "acme", "cache_salt": None},
    {"input_ids": (1, 2)},
]


class Recorder(SyncCalls):
    """Keeps the request in the place of an answer."""

    def send(self, request: Request[Any]) -> Any:
        return request


@pytest.mark.parametrize(
    ("name", "bodies"),
    [
        ("checkpoint", [{**one, "tier": "object"} for one in SELECTORS]),
        ("residency", SELECTORS),
        ("pin", [{**one, "name": "n", "ttl": 1.5, "tier": "nvme"} for one in SELECTORS]),
        ("unpin", [*SELECTORS, {"name": "n", **TENANT}]),
        ("prefetch", [{**one, "wait_s": 30} for one in SELECTORS]),
        ("forget", [{**one, "keep_tokens": 64} for one in SELECTORS]),
        ("conversation_page", [{"limit": 5, "after": "x", **TENANT}, {}]),
        ("purge", [{"cache_salt": "s"}, TENANT]),
        ("purge_all", [{}]),
        ("tenants", [{"limit": 3}, {}]),
        ("costs", [{}]),
    ],
)
def test_server_takes_what_a_client_sends(name: str, bodies: list[dict[str, Any]]) -> None:
    for body in bodies:
        request = getattr(Recorder(), name)(**body)
        given = request.given()
        if request.call.method == "GET":
            given = {field: str(value) for field, value in given.items()}
        told = msgspec.to_builtins(decode(request.call, given))
        sent = {field: value for field, value in body.items() if value is not None}
        assert {field: told[field] for field in sent} == {
            **sent,
            **({"input_ids": [1, 2]} if "input_ids" in sent else {}),
        }


@pytest.mark.parametrize(
    ("call", "body", "sentence"),
    [
        (CheckpointCall, [], "the body must be a JSON object of extra_key, cache_salt, rid"),
        (CheckpointCall, {}, "pass exactly one of rid, conversation_id, text, input_ids$"),
        (CheckpointCall, {"rid": "r", "text": "t"}, "exactly one of"),
        (CheckpointCall, {"conversation_id": "\xe9" * 257}, "has 514 bytes, more than 512; short"),
        (CheckpointCall, {"input_ids": []}, r"input_ids \[\] is refused .expected array of length"),
        (CheckpointCall, {"input_ids": [-1]}, "expected int >= 0.; pass the prefix"),
        (CheckpointCall, {"input_ids": [1] * (1 + (1 << 22))}, "length 4194305 .*<= 4194304"),
        (CheckpointCall, {"text": "a" * (1 + (1 << 24))}, "length 16777217 .*its beginning"),
        (CheckpointCall, {"text": "t", "tier": "tape"}, "'tape' is refused; pass nvme or object"),
        (CheckpointCall, {"text": "t", "prompt": "u"}, "'prompt' is unknown here; pass .*, tier$"),
        (CheckpointCall, {"text": "a\ud800"}, "text has half of a surrogate pair at character 1"),
        (PinCall, {"rid": "r", "ttl": 0}, r"ttl 0 is refused .expected float > 0.0.; pass seconds"),
        (CheckpointCall, {"text": "t", "\ud800": 1}, r"'\\ud800' is unknown"),
        (CheckpointCall, {"text": "t", "tier": "\ud800"}, "tier has half of a surrogate"),
        (PinCall, {"rid": "r", "ttl": float("nan")}, "ttl nan is refused"),
        (PinCall, {"rid": "r", "ttl": 10**5000}, "ttl of too many digits is refused"),
        (UnpinCall, {"name": "n", "rid": "r"}, "exactly one of name, rid"),
        (PrefetchCall, {"rid": "r", "wait_s": 30.1}, "wait_s 30.1 .*expected float <= 30"),
        (ForgetCall, {"rid": "r", "keep_tokens": 1 << 23}, "<= 4194304.; pass leading tokens that"),
        (PurgeCall, {}, 'pass extra_key, cache_salt or both, or "all": true alone$'),
        (PurgeCall, {"all": False}, '"all": true alone$'),
        (PurgeCall, {"all": True, "extra_key": "a"}, '"all": true alone$'),
        (TenantsCall, {"limt": 1}, "'limt' is unknown here; pass limit$"),
        (ConversationsCall, {"after": "x" * (1 + (1 << 18))}, "after 'x.* of length 262145"),
    ],
)
def test_anything_else_is_one_sentence(call: type[api.Call], body: Any, sentence: str) -> None:
    with pytest.raises(CallError, match=sentence) as caught:
        decode(call, body)
    told = str(caught.value)
    assert caught.value.status == 400 and "\n" not in told and len(told) < 300
    told.encode()  # or it could not be answered


@pytest.mark.parametrize("call", [TenantsCall, ConversationsCall, RequestsCall])
def test_a_list_has_a_bound(call: Any) -> None:
    assert decode(call, {}).limit == (20 if call is RequestsCall else 100)
    for limit in ("1", "7", "1000"):
        assert decode(call, {"limit": limit}).limit == int(limit)
    for limit in ("-1", "", "x", "true", "\u0663", "0", "1001", "9" * 5000):
        with pytest.raises(CallError, match="limit '.* is refused.*; pass how many at most"):
            decode(call, {"limit": limit})
