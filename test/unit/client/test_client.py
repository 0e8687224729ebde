"""Both clients, over real sockets, against a server that answers as the contract has it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from kit.clients import KINDS, call
from kit.serving import Quiet, serving
from sglang_tiered.client import (
    Checkpoint,
    ConversationPin,
    Forgotten,
    Pin,
    Prefetch,
    Purge,
    RequestError,
    Residency,
    TenantUsage,
    Unpinned,
)

DURABLE = {"tier": "nvme", "num_tokens": 640, "num_missing": 0}
HELD = {"num_tokens": 700, "device": 640, "host": 640, "nvme": 640, "object": 0, "peer": 0}


class Recorded(Quiet):
    """Answers what it is told to, in that order and the last for ever, and keeps what it was
    asked."""

    protocol_version = "HTTP/1.1"
    url: str
    answers: list[tuple[int, Any]]
    asked: list[tuple[str, str, dict[str, Any]]]
    keys: list[str | None]

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self._answer(url.path, dict(parse_qsl(url.query)))

    def do_POST(self) -> None:
        self._answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, path: str, body: dict[str, Any]) -> None:
        self.asked.append((self.command, path, body))
        self.keys.append(self.headers["Authorization"])
        status, answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.answer(status, answer if isinstance(answer, bytes) else json.dumps(answer).encode())


Server = type[Recorded]


@pytest.fixture
def server() -> Iterator[Server]:
    made: Any = type("Handler", (Recorded,), {"asked": [], "keys": []})
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), made)) as made.url:
        yield made


ANNA = {**DURABLE, "name": "anna", "pinned_until": 1.5e9}
LOADING = {"num_tokens": 640, "num_in_memory": 128, "num_loading": 512}
USAGE = {"tenant": "ab", "num_pages": 1, "stored_bytes": 2, "physical_bytes": 3}
ONE_OF = {"conversation_id": "c", "name": "anna", "ttl": 60, "tier": "object", "extra_key": "acme"}
CALLS: list[tuple[str, dict[str, Any], Any, Any]] = [
    ("checkpoint", {"rid": "r", "tier": "nvme"}, DURABLE, Checkpoint("nvme", 640, 0)),
    ("residency", {"input_ids": [1, 2], "extra_key": "acme"}, HELD, Residency(**HELD)),
    ("pin", ONE_OF, ANNA, Pin("nvme", 640, 0, "anna", 1.5e9)),
    ("unpin", {"name": "anna", "cache_salt": "s"}, {"unpinned": True}, Unpinned(True)),
    ("prefetch", {"text": "once", "wait_s": 2.5}, LOADING, Prefetch(640, 128, 512)),
    ("forget", {"text": "é"}, {"durable": True, "num_tokens": 576}, Forgotten(True, 576)),
    ("purge", {"extra_key": "a"}, {"durable": True, "in_memory": "gone"}, Purge(True, "gone")),
    ("purge_all", {}, {"durable": True, "in_memory": "gone"}, Purge(True, "gone")),
    ("tenants", {"limit": 5}, [[USAGE]], [[TenantUsage(**USAGE)]]),
]
ASKED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "purge_all": ("POST", "/tier/purge", {"all": True}),
    "tenants": ("GET", "/tier/tenants", {"limit": "5"}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "body", "answer", "expected"), CALLS)
def test_call_sends_and_reads_the_contract(
    server: Server, kind: str, name: str, body: dict[str, Any], answer: Any, expected: Any
) -> None:
    server.answers = [(202 if name == "prefetch" else 200, answer)]
    assert call(kind, server.url, name, **body) == expected
    assert server.asked == [ASKED.get(name, ("POST", f"/tier/{name}", body))]


PIN_BYTES = {"pinned_bytes": 4096, "pin_bound_bytes": 8192}


def conversation(number: int) -> dict[str, Any]:
    pin = {"name": "anna", "tier": "nvme", "bytes": 4096, "pinned_until": None}
    return {**HELD, "id": f"c{number}", "rid": f"r{number}", "last_used": 1.0, "pins": [pin]}


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_come_from_all_pages(server: Server, kind: str) -> None:
    pages = ((0, 1), "n+/"), ((2,), None)
    server.answers = [
        (200, {"conversations": [*map(conversation, numbers)], "next": following, **PIN_BYTES})
        for numbers, following in pages
    ]
    found = call(kind, server.url, "conversations", extra_key="acme")
    assert [one.id for one in found] == ["c0", "c1", "c2"]
    assert found[2].pins == (ConversationPin("anna", "nvme", 4096),)
    assert found[2].nvme == 640
    assert server.asked == [
        ("GET", "/tier/conversations", {"extra_key": "acme"}),
        ("GET", "/tier/conversations", {"extra_key": "acme", "after": "n+/"}),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("status", "answer", "sentence"),
    [
        (409, {"error": "all pins would take 9 of 8 bytes; unpin something"}, "9 of 8 bytes"),
        (503, {"durable": False, "num_missing": 64}, "num_missing 64.*; ask again"),
        (401, {"error": "Unauthorized"}, "/tier/pin takes no call with this key; pass --admin"),
        (404, {"detail": "Not Found"}, "/tier/pin answered 404; is it a server of sglang-tiered"),
        (200, b"<html>", "answered what this client does not know"),
        (200, {"tier": "nvme"}, "missing required field.*; use a client and a server of one"),
    ],
)
def test_refusal_is_told_in_one_sentence(
    server: Server, kind: str, status: int, answer: Any, sentence: str
) -> None:
    server.answers = [(status, answer)]
    with pytest.raises(RequestError, match=sentence) as caught:
        call(kind, server.url, "pin", rid="r")
    assert caught.value.status == status
    assert "\n" not in str(caught.value)
    if status == 503:
        assert caught.value.answer == answer
    assert len(server.asked) == 1


NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("url", "of", "body", "sentence"),
    [
        ("127.0.0.1:9", {}, {"rid": "r"}, "is not the URL of a server; write http"),
        (NOWHERE, {"api_key": "key\n"}, {"rid": "r"}, "api_key holds more than a key"),
        (NOWHERE, {}, {"input_ids": 7}, "input_ids must be a sequence of token numbers"),
        (NOWHERE, {}, {"text": "\ud800"}, "/tier/residency cannot be sent"),
        (NOWHERE, {}, {"rid": "r"}, "127.0.0.1:9 cannot be reached"),
    ],
)
def test_what_cannot_be_sent_is_one_sentence(
    kind: str, url: str, of: dict[str, Any], body: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        call(kind, url, "residency", of=of, **body)


@pytest.mark.parametrize("kind", KINDS)
def test_durable_call_asks_again_within_its_bound(server: Server, kind: str) -> None:
    missing = (503, {**DURABLE, "num_missing": 64})
    server.answers = [missing, missing, (200, DURABLE)]
    assert call(kind, server.url, "checkpoint", rid="r", within_s=60).num_missing == 0
    assert len(server.asked) == 3

    server.asked.clear()
    server.answers = [missing]
    with pytest.raises(RequestError, match="num_missing 64"):
        call(kind, server.url, "checkpoint", rid="r", within_s=0.6)
    assert len(server.asked) <= 3  # a quarter of a second apart


@pytest.mark.parametrize("kind", KINDS)
def test_keys_travel_as_bearer_tokens(server: Server, kind: str) -> None:
    server.answers = [(200, DURABLE)]
    call(kind, server.url + "/", "checkpoint", rid="r", of={"api_key": "sécret".encode().hex()})
    call(kind, server.url, "checkpoint", rid="r")
    assert server.keys == ["Bearer " + "sécret".encode().hex(), None]
    assert {path for _, path, _ in server.asked} == {"/tier/checkpoint"}


PROXIES = {"http_proxy": "http://127.0.0.1:9", "ALL_PROXY": "socks5://127.0.0.1:9"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variable", PROXIES)
def test_proxy_is_not_asked_for_this_machine(
    server: Server, kind: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv(variable, PROXIES[variable])
    server.answers = [(200, DURABLE)]
    for host in ("127.0.0.1", "localhost"):
        call(kind, server.url.replace("127.0.0.1", host), "checkpoint", rid="r")
    assert len(server.asked) == 2


def test_client_imports_neither_torch_nor_sglang() -> None:
    program = (
        "import sys, sglang_tiered.client;"
        "heavy = {'torch', 'sglang', 'zmq', 'numpy'} & sys.modules.keys(); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
