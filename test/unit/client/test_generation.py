"""Answers that break off, come twice or go on wrongly when their server dies."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from kit.serving import Quiet, serving
from sglang_tiered.client import AsyncTierClient, Generated, RequestError, TierClient
from sglang_tiered.client.generation import (
    MAX_RESUMED,
    Answer,
    BrokenStreamError,
)

KINDS = ("sync", "async")
PROMPT = [7, 8, 9]
GREEDY = {"temperature": 0, "max_new_tokens": 12}


def following(ids: list[int], num_new: int) -> list[int]:
    """Tokens that depend on all before."""
    ids = list(ids)
    for _ in range(num_new):
        ids.append((sum(ids) * 31 + len(ids)) % 1000)
    return ids[len(ids) - num_new :]


class Generator(ThreadingHTTPServer):
    """Streams as SGLang does. ``lives``: of each request in turn, the tokens after which its server
    dies, an HTTP status, or the reason that an answer ends by after a token; None and none left: a
    whole one."""

    daemon_threads = True
    url = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Stream)
        self.lives: deque[Any] = deque()
        self.asked: list[dict[str, Any]] = []
        self.is_incremental = False
        self.ends_cleanly = False  # as behind a front, when its server dies

    def handle_error(self, *_: Any) -> None:
        """A client that has its answer hangs up."""


class _Stream(Quiet):
    protocol_version = "HTTP/1.1"
    server: Generator

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        life = self.server.lives.popleft() if self.server.lives else None
        if isinstance(life, tuple):
            status, answer = life
            again = "1" if status == 429 else "soon"
            self.answer(status, json.dumps(answer).encode(), Retry_After=again)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        num_new = body["sampling_params"]["max_new_tokens"]
        ids = following(body["input_ids"], num_new)
        for number in range(1, num_new + 1):
            if life == number - 1:
                self._end()
                return
            is_last = number == num_new
            self._tell(ids[:number], {"type": "length"} if is_last else None, body)
            if isinstance(life, dict):
                self._tell(ids[:number], life, body)
                break
        self._send(b"data: [DONE]\n\n")
        self._send(b"")

    def _tell(self, ids: list[int], reason: Any, body: dict[str, Any]) -> None:
        shown = ids[-1:] if self.server.is_incremental else ids
        num_cached = len(body["input_ids"]) // 4 * 4
        told = {"completion_tokens": len(ids), "finish_reason": reason, "cached_tokens": num_cached}
        # What other libraries take for the end of a line, and SGLang does not write as an escape.
        chunk = {"text": "\u2028\x85 " * len(ids), "output_ids": shown, "meta_info": told}
        line = b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"
        self._send(line[:20])
        self._send(line[20:])

    def _send(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _end(self) -> None:
        if self.server.ends_cleanly:
            self._send(b"")
        self.close_connection = True


@pytest.fixture
def server() -> Iterator[Generator]:
    made = Generator()
    with serving(made) as made.url:
        yield made


def generate(
    kind: str, url: str, sampling: dict[str, Any], prompt: Any = PROMPT, **more: Any
) -> list[Generated]:
    if kind == "sync":
        with TierClient(url) as client:
            return list(client.generate(prompt, sampling, **more))

    async def run() -> list[Generated]:
        async with AsyncTierClient(url) as client:
            return [piece async for piece in client.generate(prompt, sampling, **more)]

    return asyncio.run(run())


def ids_of(pieces: list[Generated]) -> list[int]:
    return [token for piece in pieces for token in piece.ids]


@pytest.mark.parametrize("ends_cleanly", [False, True])
@pytest.mark.parametrize("is_incremental", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_broken_answers_are_those_of_one_server(
    server: Generator, kind: str, *, is_incremental: bool, ends_cleanly: bool
) -> None:
    server.is_incremental, server.ends_cleanly = is_incremental, ends_cleanly
    server.lives += [3, (503, {}), 0, 1, 5]
    pieces = generate(kind, server.url, GREEDY)
    assert ids_of(pieces) == following(PROMPT, 12)
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == {"type": "length"}
    left = [body["sampling_params"]["max_new_tokens"] for body in server.asked]
    assert left == [12, 9, 9, 9, 8, 3]
    assert [len(body["input_ids"]) for body in server.asked] == [3, 6, 6, 6, 7, 12]
    assert pieces[0].num_resumed == 0 and pieces[0].num_computed_again == 0
    last = pieces[-1]
    assert last.is_exact and last.num_cached == 12
    assert last.num_resumed == 3, "not the attempts that brought nothing"
    assert last.num_computed_again == (6 - 1 - 4) + (7 - 1 - 4), "of 12 it had all"


@pytest.mark.parametrize(
    ("sampling", "is_seeded", "is_exact"),
    [
        ({"temperature": 0}, False, True),
        ({"temperature": 1, "top_k": 1}, False, True),
        ({"temperature": 1, "sampling_seed": 0}, False, False),
        ({"temperature": 1, "sampling_seed": 0}, True, True),
        ({"temperature": 1}, False, False),
        ({"temperature": 0, "frequency_penalty": 0.5}, False, False),
    ],
)
def test_what_others_would_have_drawn_is_told(
    server: Generator, sampling: dict[str, Any], is_seeded: bool, is_exact: bool
) -> None:
    """Seeds count where servers draw by them."""
    server.lives += [2]
    sampling = {"max_new_tokens": 4, **sampling}
    pieces = generate("sync", server.url, sampling, is_seeded=is_seeded)
    assert [piece.is_exact for piece in pieces] == [True, True, is_exact, is_exact]


@pytest.mark.parametrize("name", ["json_schema", "regex", "stop"])
def test_answers_judged_whole_do_not_go_on(server: Generator, name: str) -> None:
    server.lives += [2]
    sampling = {**GREEDY, name: "x"}
    with pytest.raises(RequestError, match=f"broke after 2 tokens .* as {name} is judged"):
        generate("sync", server.url, sampling)
    assert len(server.asked) == 1
    server.lives += [0]  # of this one nothing came
    assert ids_of(generate("sync", server.url, sampling)) == following(PROMPT, 12)


@pytest.mark.parametrize("kind", KINDS)
def test_refusals_are_not_repeated(server: Generator, kind: str) -> None:
    server.lives += [(400, {"error": {"message": "input is too long"}})]
    with pytest.raises(RequestError, match="answered 400.*input is too long"):
        generate(kind, server.url, GREEDY)
    assert len(server.asked) == 1


def test_several_answers_at_once_are_not_asked_for(server: Generator) -> None:
    with pytest.raises(RequestError, match="n 2 is more than one answer"):
        generate("sync", server.url, {**GREEDY, "n": 2})
    assert not server.asked


def test_aborted_answers_of_a_draining_server_go_on(server: Generator) -> None:
    server.lives += [{"type": "abort", "status_code": 503, "message": "draining"}]
    pieces = generate("sync", server.url, GREEDY)
    assert ids_of(pieces) == following(PROMPT, 12)
    assert pieces[-1].num_resumed == 1


@pytest.mark.parametrize("status", [None, 400])
def test_an_operators_abort_is_no_death(server: Generator, status: int | None) -> None:
    server.lives += [{"type": "abort", "status_code": status, "message": "no more"}]
    with pytest.raises(RequestError, match="was aborted: no more"):
        generate("sync", server.url, GREEDY)
    assert len(server.asked) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_shed_answers_come_back_when_they_may(server: Generator, kind: str) -> None:
    """The servers that are left have more to do."""
    server.lives += [2, (429, {})]
    began = time.monotonic()
    assert ids_of(generate(kind, server.url, GREEDY)) == following(PROMPT, 12)
    assert time.monotonic() - began >= 0.8, "the second that it asked for, less what spreads them"


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_there_ends_in_time(server: Generator, kind: str) -> None:
    server.lives += [2] + [(503, {})] * 100
    with pytest.raises(RequestError, match="broke after 2 .*answered 503.* for 0.3 s.*resume_s"):
        generate(kind, server.url, GREEDY, resume_s=0.3)


@pytest.fixture
def answer() -> Answer:
    return Answer(PROMPT, GREEDY, is_seeded=False, resume_s=60, clock=lambda: 0.0)


ENDED = BrokenStreamError("it ended")


def line(token: int, num_tokens: int) -> bytes:
    told = {"completion_tokens": num_tokens, "finish_reason": None}
    return b"data: " + json.dumps({"output_ids": [token], "meta_info": told}).encode() + b"\n"


def test_an_answer_that_kills_servers_ends(answer: Answer) -> None:
    for number in range(MAX_RESUMED + 1):
        answer.body()
        (piece,) = answer.read(line(number, 1))
        assert piece.num_resumed == number
        if number < MAX_RESUMED:
            answer.resume(ENDED, "it ended")
    with pytest.raises(RequestError, match="broke after 17 tokens .* the 17th time"):
        answer.resume(ENDED, "it ended")


def test_nothing_is_read_behind_the_end(answer: Answer) -> None:
    told = {"completion_tokens": 1, "finish_reason": {"type": "length"}}
    end = json.dumps({"output_ids": [1], "meta_info": told}).encode()
    (piece,) = answer.read(b"data: " + end + b"\ndata: of a proxy\n")
    assert piece.finish_reason == {"type": "length"} and answer.has_ended


def test_missing_tokens_are_no_answer() -> None:
    answer = Answer(PROMPT, GREEDY, is_seeded=False, resume_s=60)
    chunk = {"output_ids": [1], "meta_info": {"completion_tokens": 2, "finish_reason": None}}
    with pytest.raises(RequestError, match="cannot read"):
        list(answer.read(b"data: " + json.dumps(chunk).encode() + b"\n"))
