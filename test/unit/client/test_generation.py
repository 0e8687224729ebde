"""Answers that break off, come twice or go on wrongly when their server dies."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from kit.clients import KINDS, call
from kit.serving import Quiet, serving
from sglang_tiered.client import Generated, RequestError
from sglang_tiered.client.generation import (
    MAX_RESUMED,
    Answer,
    BrokenStreamError,
)

PROMPT = [7, 8, 9]
GREEDY = {"temperature": 0, "max_new_tokens": 12, "min_new_tokens": 4}


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
    pieces = call(kind, server.url, "generate", PROMPT, GREEDY)
    assert ids_of(pieces) == following(PROMPT, 12)
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == {"type": "length"}
    for name, left in (("max", [12, 9, 9, 9, 8, 3]), ("min", [4, 1, 1, 1, 0, 0])):
        assert [body["sampling_params"][f"{name}_new_tokens"] for body in server.asked] == left
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
    pieces = call("sync", server.url, "generate", PROMPT, sampling, is_seeded=is_seeded)
    assert [piece.is_exact for piece in pieces] == [True, True, is_exact, is_exact]


JUDGED_WHOLE = [{name: "x"} for name in ("json_schema", "regex", "stop")]
DRAINS = {"type": "abort", "status_code": 503, "message": "draining"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("life", "sampling", "sentence"),
    [
        *((2, each, f"broke after 2 tokens .* as {[*each][0]} is judged") for each in JUDGED_WHOLE),
        ((400, {"error": {"message": "input is too long"}}), {}, "answered 400.*input is too long"),
        # An operator's abort is no death.
        ({**DRAINS, "status_code": None}, {}, "was aborted: draining"),
        ({**DRAINS, "status_code": 400}, {}, "was aborted: draining"),
        (None, {"n": 2}, "n 2 is more than one answer"),
        (None, {"max_new_tokens": 0}, "max_new_tokens 0 is no number of tokens"),
    ],
)
def test_what_may_not_go_on_does_not(
    server: Generator, kind: str, life: Any, sampling: dict[str, Any], sentence: str
) -> None:
    server.lives += [life]
    with pytest.raises(RequestError, match=sentence):
        call(kind, server.url, "generate", PROMPT, {**GREEDY, **sampling})
    assert len(server.asked) == (life is not None)


@pytest.mark.parametrize(
    ("life", "sampling", "num_resumed"),
    [(DRAINS, {}, 1), *((0, each, 0) for each in JUDGED_WHOLE)],  # of which nothing came
)
def test_what_may_go_on_does(
    server: Generator, life: Any, sampling: dict[str, Any], num_resumed: int
) -> None:
    server.lives += [life]
    pieces = call("sync", server.url, "generate", PROMPT, {**GREEDY, **sampling})
    assert ids_of(pieces) == following(PROMPT, 12)
    assert pieces[-1].num_resumed == num_resumed


@pytest.mark.parametrize("kind", KINDS)
def test_shed_answers_come_back_when_they_may(server: Generator, kind: str) -> None:
    """The servers that are left have more to do."""
    server.lives += [2, (429, {})]
    began = time.monotonic()
    assert ids_of(call(kind, server.url, "generate", PROMPT, GREEDY)) == following(PROMPT, 12)
    assert time.monotonic() - began >= 0.8, "the second that it asked for, less what spreads them"


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_there_ends_in_time(server: Generator, kind: str) -> None:
    server.lives += [2] + [(503, {})] * 100
    with pytest.raises(RequestError, match="broke after 2 .*answered 503.* for 0.3 s.*resume_s"):
        call(kind, server.url, "generate", PROMPT, GREEDY, resume_s=0.3)


@pytest.fixture
def answer() -> Answer:
    return Answer(PROMPT, GREEDY, is_seeded=False, resume_s=60, clock=lambda: 0.0)


ENDED = BrokenStreamError("it ended")


def line(token: int, num_tokens: int, reason: Any = None) -> bytes:
    told = {"completion_tokens": num_tokens, "finish_reason": reason}
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
    (piece,) = answer.read(line(1, 1, {"type": "length"}) + b"data: of a proxy\n")
    assert piece.finish_reason == {"type": "length"} and answer.has_ended


def test_missing_tokens_are_no_answer(answer: Answer) -> None:
    with pytest.raises(RequestError, match="cannot read"):
        list(answer.read(line(1, 2)))


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        ({"code": 503, "message": "it ends"}, BrokenStreamError),
        ({"code": 400, "message": "it ends"}, RequestError),
        ("it ends", RequestError),
    ],
)
def test_error_amid_a_stream_counts_by_code(
    answer: Answer, error: Any, raised: type[Exception]
) -> None:
    with pytest.raises(raised, match="^it ends$"):
        list(answer.read(b"data: " + json.dumps({"error": error}).encode() + b"\n"))
