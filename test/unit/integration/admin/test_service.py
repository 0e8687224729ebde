"""What the service makes of the schedulers' answers, with a manager that answers from a list."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

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
    ResidencyCall,
    TenantsCall,
    UnpinCall,
)
from sglang_tiered.integration.admin import service

DONE = {"done": True, "num_tokens": 128, "num_missing": 0}
UNDER_WAY = {"done": False, "num_tokens": 64, "num_missing": 64}
REFUSED = {"error": "full", "status": 409}
FULL = {"error": "full", "status": 503}
UNKNOWN = {"done": True, "unknown": True}


class Manager:
    """SGLang's tokenizer manager as the service uses it; each question takes the next answers."""

    tokenizer: Any = SimpleNamespace(encode=lambda text: list(text.encode()))

    def __init__(self, *answers: list[Any]) -> None:
        self._answers = list(answers)
        self.asked: list[Any] = []

    async def dumper_control(self, message: Any) -> list[Any]:
        self.asked.append(message)
        found = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return [
            SimpleNamespace(success=False, response=[], error=answer)
            if isinstance(answer, str)
            else SimpleNamespace(success=True, response=[answer])
            for answer in found
        ]


def call(
    kind: type[api.Call], body: dict[str, Any], *answers: list[Any]
) -> tuple[tuple[int, Any], Manager]:
    manager = Manager(*answers)

    async def ask() -> tuple[int, Any]:
        asked: Any = manager  # as it is used
        return await service.answer(asked, api.decode(kind, body))

    return asyncio.run(ask()), manager


def test_a_question_is_repeated_until_all_are_done() -> None:
    report, manager = call(
        CheckpointCall,
        {"input_ids": [1, 2]},
        [UNDER_WAY, DONE], [UNDER_WAY, DONE], [DONE, DONE],
    )  # fmt: skip
    assert report == (200, {"num_tokens": 128, "num_missing": 0})
    first, *later = [message.body for message in manager.asked]
    assert len(later) == 2 and first["input_ids"] == [1, 2]
    assert all(body == {"id": first["id"]} for body in later), "the prompt may be long"


def test_time_that_is_up_tells_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "TIMEOUT_S", 0.0)
    report, _ = call(CheckpointCall, {"rid": "r"}, [UNDER_WAY])
    assert report == (503, {"num_tokens": 64, "num_missing": 64})
    report, _ = call(UnpinCall, {"rid": "r"}, [{"done": True}, {"done": False}])
    assert report == (503, {"unpinned": False})
    loading = {"num_in_memory": 0, "num_loading": 64}
    report, _ = call(PrefetchCall, {"rid": "r"}, [{"done": False, **loading}])
    assert report == (202, loading)
    with pytest.raises(CallError, match="ask again") as caught:
        call(TenantsCall, {}, [{"done": False}])
    assert caught.value.status == 503


def test_replicas_that_know_no_rid_forget_too() -> None:
    forgotten = {"done": True, "durable": True, "num_tokens": 64}
    report, manager = call(
        ForgetCall,
        {"rid": "r"},
        [UNKNOWN, {**forgotten, "hashes": ["ab"]}],
        [{**forgotten, "durable": False}, forgotten],
    )
    assert [each.body["hashes"] for each in manager.asked if "hashes" in each.body] == [["ab"]]
    told = {"error": service.NOT_FORGOTTEN, "durable": False, "num_tokens": 64}
    assert report == (503, told)


def test_replicas_forget_what_any_of_them_knows() -> None:
    """A conversation may have turned in several, and the first has not all pages of it."""
    under_way = {"done": False, "durable": False, "num_tokens": 64}
    done = {"done": True, "durable": True, "num_tokens": 128}
    report, manager = call(
        ForgetCall,
        {"rid": "r"},
        [{**under_way, "hashes": ["a"]}, {**under_way, "hashes": ["a", "b"]}, UNKNOWN],
        [under_way, done, UNKNOWN],
        [done, done, under_way],
        [done, done, done],
    )
    assert report == (200, {"durable": True, "num_tokens": 128})
    asked = [message.body for message in manager.asked]
    assert [body["id"] for body in asked if "rid" in body] == [asked[0]["id"]], "it begins once"
    assert [body["hashes"] for body in asked if "hashes" in body] == [["a", "b"]]


@pytest.mark.parametrize(
    ("kind", "body", "answers", "status", "sentence"),
    [
        (CheckpointCall, {"rid": "r"}, [{"unknown": True}], 404, "no recent request has"),
        (UnpinCall, {"name": "n"}, [{"unknown": "no such pin"}], 404, "no such pin"),
        (ForgetCall, {"rid": "r"}, [{"unknown": True}], 404, "no recent request"),
        (PrefetchCall, {"rid": "r"}, [UNKNOWN], 404, "no recent request"),
        (PrefetchCall, {"rid": "r"}, [FULL, UNKNOWN], 503, "full"),
        (PinCall, {"rid": "r"}, [DONE, REFUSED], 409, "full"),
        (PurgeCall, {"all": True}, [{"error": "detached", "status": 503}], 503, "detach"),
        (ResidencyCall, {"rid": "r"}, [REFUSED, "KeyError: 7"], 500, "KeyError: 7"),
        (UnpinCall, {"rid": "r"}, [{"unknown": True}, "KeyError: 7"], 500, "KeyError"),
    ],
)
def test_every_refusal_has_its_status(
    kind: Any, body: Any, answers: list[Any], status: int, sentence: str
) -> None:
    with pytest.raises(CallError, match=sentence) as caught:
        call(kind, body, answers)
    assert caught.value.status == status


def test_a_text_has_the_bound_of_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MAX_TOKENS", 8)
    _, manager = call(ResidencyCall, {"text": "ääää"}, [DONE])
    assert manager.asked[0].body["input_ids"] == list("ääää".encode())
    with pytest.raises(CallError, match="text has 9 tokens, more than 8"):
        call(ResidencyCall, {"text": "ääääa"}, [DONE])


def test_pages_of_replicas_make_one() -> None:
    def answer(rank: int, rows: list[str], next_cursor: str | None) -> dict[str, Any]:
        sizes = {"pinned_bytes": 10, "pin_bound_bytes": 100}
        return {"done": True, "rank": rank, "conversations": rows, "next": next_cursor, **sizes}

    report, _ = call(ConversationsCall, {}, [answer(1, ["b"], None), answer(0, ["a"], "r7")])
    assert report[1]["conversations"] == ["b", "a"]
    assert (report[1]["pinned_bytes"], report[1]["pin_bound_bytes"]) == (20, 200)
    last, manager = call(
        ConversationsCall,
        {"after": report[1]["next"], "limit": 1},
        [answer(0, ["c"], None), answer(1, [], None)],
    )
    assert manager.asked[0].body["after"] == {"0": "r7", "1": None}
    assert last[1]["next"] is None


@pytest.mark.parametrize(
    "after",
    ["%", "\N{SNOWMAN}", "e30x", *map(service._cursor_of, [{"0": "r-1"}, {"0": "q"}, {"0": "pn"}])],
)
def test_cursor_of_nobody_is_refused(after: str) -> None:
    with pytest.raises(CallError, match="after '.*' is not what an answer gave as next"):
        call(ConversationsCall, {"after": after}, [DONE])
