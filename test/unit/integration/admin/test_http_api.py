"""How bodies are read off the wire."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import Request

from sglang_tiered.integration.admin import http_api
from sglang_tiered.integration.admin.bodies import CallError, parse_selector


def read_body(body: bytes) -> Any:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    return asyncio.run(http_api._json(Request({"type": "http"}, receive)))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"", "the body is not JSON"),
        (b'{"all": tru', "the body is not JSON"),
        (b"\xff", "the body is not JSON"),
    ],
)
def test_unreadable_body_is_answered_with_one_sentence(body: bytes, sentence: str) -> None:
    with pytest.raises(CallError, match=f"{sentence}.*; pass a JSON object"):
        read_body(body)


@pytest.mark.parametrize("text", [b"\\ud800", b"\xed\xa0\x80"])
def test_half_a_character_is_always_refused(text: bytes) -> None:
    for body in (b'{"text": "%s"}', b'{"text": "a", "extra_key": "%s"}', b'{"%s": 1}'):
        with pytest.raises(CallError) as caught:
            parse_selector(read_body(body % text), with_tier=True)
        str(caught.value).encode()  # or it could not be answered


def test_too_many_digits_are_no_token() -> None:
    query = "input_ids=1, 22," + "1" * 5000 + ",x,"
    request = Request({"type": "http", "query_string": query.encode()})
    assert http_api._query(request) == {"input_ids": [1, 22, -1, -1, -1]}
