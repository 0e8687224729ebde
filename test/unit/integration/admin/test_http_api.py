"""How bodies are read off the wire."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from sglang.srt import runtime_context
from sglang.srt.utils import auth
from sglang.srt.utils.auth import add_api_key_middleware, decide_request_auth

from sglang_tiered.api import CallError, CheckpointCall, RequestsCall, decode
from sglang_tiered.integration.admin import http_api
from sglang_tiered.integration.admin.http_api import add_routes
from sglang_tiered.integration.admin.role_switch import around_auth
from sglang_tiered.request_log import VERSION, RequestLogConfig


def read_body(body: bytes) -> Any:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    return asyncio.run(http_api._json(Request({"type": "http"}, receive)))


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 100_000, b"", b'{"all": tru', b"\xff"])
def test_unreadable_body_is_answered_with_one_sentence(body: bytes) -> None:
    with pytest.raises(CallError, match=r"(nested too deeply|not JSON).*; pass a JSON object"):
        read_body(body)


@pytest.mark.parametrize("text", [b"\\ud800", b"\xed\xa0\x80"])
def test_half_a_character_is_always_refused(text: bytes) -> None:
    for body in (b'{"text": "%s"}', b'{"text": "a", "extra_key": "%s"}', b'{"%s": 1}'):
        with pytest.raises(CallError) as caught:
            decode(CheckpointCall, read_body(body % text))
        str(caught.value).encode()  # or it could not be answered


def test_one_look_at_a_hanging_disk(tmp_path: Path) -> None:
    """Or the threads that look up names would all wait for that disk."""
    os.mkfifo(tmp_path / "log")  # opening it waits for a writer
    config: Any = SimpleNamespace(request_log=RequestLogConfig(path=str(tmp_path / "log")))
    endpoint = http_api._endpoint(RequestsCall, partial(http_api._newest, config), has_key=True)

    scope = {"type": "http", "method": "GET", "query_string": b""}

    async def look() -> int:
        return (await endpoint(Request(scope))).status_code

    async def looks() -> list[int]:
        hanging = asyncio.create_task(look())
        await asyncio.sleep(0)  # it begins
        seconds = [await asyncio.wait_for(look(), 60) for _ in range(3)]
        with (tmp_path / "log").open("wb"):
            first = await asyncio.wait_for(hanging, 60)
        (tmp_path / "log").unlink()
        return [first, *seconds, await asyncio.wait_for(look(), 60)]

    assert asyncio.run(looks()) == [200, 503, 503, 503, 200]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., httpx.Response]:
    """Asks an application that has our routes, and SGLang's keys as our hook has them."""
    monkeypatch.setattr(auth, "decide_request_auth", partial(around_auth, decide_request_auth))
    root = SimpleNamespace(fastapi_root_path="")
    monkeypatch.setattr(runtime_context, "get_serving", lambda: root)

    async def answer(*_: Any) -> Any:
        return 200, {}

    monkeypatch.setattr(http_api, "_ask_schedulers", answer)

    def ask(method: str, path: str, key: str | None = None, **sent: Any) -> httpx.Response:
        app = FastAPI()
        add_routes(app, None, None, has_key=key is not None)  # type: ignore[arg-type]
        if key is not None:
            add_api_key_middleware(app, api_key=key, admin_api_key=None)

        async def asked() -> httpx.Response:
            transport, url = httpx.ASGITransport(app), "http://server.example:30000"
            async with httpx.AsyncClient(transport=transport, base_url=url) as client:
                return await client.request(method, path, **sent)

        return asyncio.run(asked())

    return ask


@pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")  # of SGLang's refusal
def test_page_alone_needs_no_key(served: Callable[..., httpx.Response]) -> None:
    for method in ("GET", "HEAD"):
        response = served(method, "/tier/", "own")
        assert response.status_code == 200
        assert "default-src 'none'" in response.headers["content-security-policy"]
    for method, path in (
        ("POST", "/tier/"),
        ("GET", "/tier/tenants"),
        ("GET", "/tier/costs"),
        ("GET", "//tier/"),
        ("GET", "/TIER/"),
        ("GET", "/ti%09er/"),  # as a URL it is the page, and as a route it is not
        ("GET", "/tier/%3F"),
    ):
        assert served(method, path, "own").status_code == 401, path
    host = {"host": "x/tier/?"}
    assert served("GET", "/tier/tenants", "own", headers=host).status_code == 401


def test_nobody_is_told_to_ask_too_early(
    served: Callable[..., httpx.Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allowance of an hour is not back in a second."""

    async def refuse(*_: Any) -> Any:
        raise CallError("ask again after 3,000 s", 503)

    monkeypatch.setattr(http_api, "_ask_schedulers", refuse)
    response = served("POST", "/tier/forget", json={"rid": "r"})
    assert response.status_code == 503 and "retry-after" not in response.headers


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/tier/purge", {}, 200),  # a program
        ("/tier/purge", {"origin": "http://server.example:30000"}, 200),  # our page
        ("/tier/purge", {"origin": "http://evil.example"}, 403),
        ("/tier/purge", {"origin": "null"}, 403),  # a sandboxed frame
        ("/tier/purge", {"origin": "http://server.example:8000"}, 403),
        # A header which any page may add:
        ("/tier/purge", {"origin": "http://evil.example", "authorization": "Bearer x"}, 403),
        ("/tier/purge", {"origin": "https://proxy.example", "sec-fetch-site": "same-origin"}, 200),
        ("/tier/tenants", {"sec-fetch-site": "cross-site"}, 403),
        ("/tier/costs", {"sec-fetch-site": "cross-site"}, 403),
        ("/tier/tenants", {"sec-fetch-site": "none"}, 200),  # typed
    ],
)
def test_other_sites_send_nothing_without_key(
    served: Callable[..., httpx.Response], path: str, headers: dict[str, str], status: int
) -> None:
    """A server with keys asks every site for one, and one that has it may act."""
    method, body = ("POST", b'{"all": true}') if path == "/tier/purge" else ("GET", b"")
    assert served(method, path, headers=headers, content=body).status_code == status
    if path != "/tier/costs":
        headers = {**headers, "authorization": "Bearer own"}
        assert served(method, path, "own", headers=headers, content=body).status_code == 200


def test_half_a_line_hides_no_request(tmp_path: Path) -> None:
    """Nor one of another version; and many replicas are read no more than one."""
    config = RequestLogConfig(path=str(tmp_path / "log"), num_replicas=8)
    line = {"v": VERSION, "arrived_unix_s": 1e6, "end": "stop", "num_prompt_tokens": 9}
    lines = [json.dumps({**line, "rid": str(n), "total_s": 1.0, "tokens": {}}) for n in range(99)]
    for replica in range(8):
        text = "\n".join([lines[0], '{"v":99}', "{half", *lines[1:]]) + "\n"
        config.file_of(replica).write_text(text * 200)
    told = http_api.newest_requests(config, 3, now=1e6 + 2)
    assert len(told.requests) == 3 and not told.minute.is_whole
    assert 0 < told.minute.num_requests * len(lines[0]) <= http_api.TAIL_BYTES
