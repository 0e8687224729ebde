"""Any body is a prompt, and a strange one goes by its bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_tiered.route.prompt import parse_body, prompt_of

PAGE = 16
IDS = [(7 * number * number + 3) % 50_000 for number in range(5 * PAGE + 3)]


def prompt(body: dict[str, Any], path: str = "/v1/completions") -> Any:
    data = json.dumps(body).encode()
    return prompt_of(parse_body(data), len(data), path)


def test_tokens_come_from_where_clients_put_them() -> None:
    for body in ({"input_ids": IDS}, {"input_ids": [IDS, [1]]}, {"prompt": IDS}, {"prompt": [IDS]}):
        assert list(prompt(body).ids) == IDS, body
    unknown = prompt({"prompt": "x" * 400})
    assert unknown.ids is None and 100 <= unknown.num_tokens < 120
    assert unknown.keys(PAGE) == []


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": ["a", 1]},
        {"input_ids": [1, -1]},
        {"input_ids": [1, 1 << 40]},
        {"messages": 3, "tools": "x", "stream": 1, "max_tokens": "many"},
        {"prompt": [[]], "sampling_params": [1]},
        {"input_ids": [1, 2], "extra_key": ["a", "b"]},
        {"input_ids": [1, 2], "lora_path": "a"},
    ],
)
def test_strange_bodies_go_by_their_bytes(body: dict[str, Any]) -> None:
    made = prompt(body)
    assert made.ids is None and made.num_tokens >= 1 and made.keys(PAGE) == []


@pytest.mark.parametrize("data", [b"[1]", b"{", b'"a"', b"\xff", b"[" * 5000])
def test_what_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_body(data)


def test_a_stream_of_openai_has_its_head_late() -> None:
    body = {"input_ids": IDS, "stream": True, "max_tokens": 7}
    assert prompt(body).is_stream and prompt(body).max_new == 7
    assert not prompt(body, "/generate").is_stream
    assert not prompt({**body, "stream": False}).is_stream
    assert prompt({"input_ids": IDS, "sampling_params": {"max_new_tokens": 9}}).max_new == 9
