"""Any body is a prompt: in time, with the tokens that the server makes, or by its bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_tiered.demo.model import BEGIN, END, byte_tokenizer, tokenizer_config
from sglang_tiered.route.prompt import (
    LocalTokenizer,
    Prompt,
    TokenReader,
    ask_of,
    parse_body,
    prompt_of,
)

PAGE = 16
IDS = [(7 * number * number + 3) % 50_000 for number in range(5 * PAGE + 3)]


def made_of(body: dict[str, Any], path: str = "/v1/completions") -> Any:
    data = json.dumps(body).encode()
    return prompt_of(parse_body(data), len(data), path)


def test_tokens_come_from_where_clients_put_them() -> None:
    for body in ({"input_ids": IDS}, {"input_ids": [IDS, [1]]}, {"prompt": IDS}, {"prompt": [IDS]}):
        assert list(made_of(body).ids) == IDS, body
    unknown = made_of({"prompt": "x" * 400})
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
    made = made_of(body)
    assert made.ids is None and made.num_tokens >= 1 and made.keys(PAGE) == []


@pytest.mark.parametrize("data", [b"[1]", b"{", b'"a"', b"\xff", b"[" * 5000])
def test_what_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_body(data)


def test_a_stream_of_openai_has_its_head_late() -> None:
    body = {"input_ids": IDS, "stream": True, "max_tokens": 7}
    assert made_of(body).is_stream and made_of(body).max_new == 7
    assert not made_of(body, "/generate").is_stream
    assert not made_of({**body, "stream": False}).is_stream
    assert made_of({"input_ids": IDS, "sampling_params": {"max_new_tokens": 9}}).max_new == 9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config()))
    return tmp_path


def encoded(folder: Path, body: dict[str, Any]) -> list[int] | None:
    asked = ask_of(parse_body(json.dumps(body).encode()))
    assert asked is not None
    return LocalTokenizer(folder).encode(asked)


def test_chat_is_rendered_by_the_models_template(folder: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    user, assistant = 258, 259
    assert encoded(folder, {"messages": messages}) == [BEGIN, user, *b"hi", END, assistant]
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert encoded(folder, {"messages": [{"role": "user", "content": parts}]}) == [
        *(BEGIN, user, *b"h i", END, assistant)
    ]
    assert encoded(folder, {"prompt": ["hi", "ho"]}) == [*b"hi"]
    assert encoded(folder, {"text": "hi"}) == [*b"hi"]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [3]}],
    ],
)
def test_what_is_not_only_text_has_no_tokens(folder: Path, messages: list[Any]) -> None:
    assert encoded(folder, {"messages": messages}) is None


def test_template_is_kept_in_its_sandbox(folder: Path) -> None:
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (folder / "chat_template.jinja").write_text(source)
    assert encoded(folder, {"messages": [{"role": "user", "content": "hi"}]}) is None


KEY = "Bearer of-the-client"


class Asked:
    """A server that is asked for tokens, and may hang."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.hangs, self.asked = hangs, 0

    async def __call__(self, body: dict[str, Any], key: str) -> Sequence[int] | None:
        assert key == KEY
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        return list(body["prompt"].encode())


def read(asked: Asked, *bodies: bytes, budget_s: float = 5.0) -> tuple[list[Prompt], int]:
    async def run() -> tuple[list[Prompt], int]:
        reader = TokenReader(None, asked, budget_s, lambda: {64})
        try:
            made = await asyncio.gather(
                *(reader.read(one, "/v1/completions", KEY) for one in bodies)
            )
            return list(made), reader.num_late
        finally:
            reader.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    return asyncio.run(run())


def test_a_server_says_what_a_text_is() -> None:
    asked = Asked()
    (prompt, ids, garbage, empty), num_late = read(
        asked, b'{"prompt": "hi"}', b'{"prompt": [1, 2]}', b"\xff" * 40, b""
    )
    assert prompt.ids is not None and list(prompt.ids) == [*b"hi"]
    assert ids.ids is not None and list(ids.ids) == [1, 2]
    assert (garbage.ids, garbage.num_tokens, empty.num_tokens) == (None, 10, 1)
    assert (asked.asked, num_late) == (1, 0)


def test_hanging_server_holds_no_request_up() -> None:
    body = json.dumps({"prompt": "x" * 4000}).encode()
    prompts, num_late = read(Asked(hangs=True), *[body] * 40, budget_s=0.05)
    assert all(one.ids is None and one.num_tokens > 1000 for one in prompts)
    assert num_late == 40


def test_huge_bodies_take_nobodys_time() -> None:
    """One client's would be all that the picker does."""
    asked = Asked()
    text = json.dumps({"prompt": "x" * (2 << 20)}).encode()
    ids = b'{"prompt": [' + b"1," * (4 << 20) + b"1]}"
    (as_text, as_ids), num_late = read(asked, text, ids)
    assert (as_text.ids, as_ids.ids, asked.asked, num_late) == (None, None, 0, 1)
    assert as_ids.num_tokens == len(ids) // 4


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_other_calls_teach_no_half_prompt(folder: Path, path: str) -> None:
    """Their text stands in more fields than a chat's, and their heads come at once."""
    body = {"system": "s", "messages": [{"role": "user", "content": "hi"}], "stream": True}

    async def run() -> Prompt:
        reader = TokenReader(LocalTokenizer(folder), Asked(), 5.0)
        try:
            return await reader.read(json.dumps(body).encode(), path)
        finally:
            reader.close()

    prompt = asyncio.run(run())
    assert prompt.ids is None and not prompt.is_stream


TOOL = {"type": "function", "function": {"parameters": {}, "name": "f"}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}


@pytest.mark.parametrize(
    ("more", "rendered"),
    [
        ({}, "- - 1"),
        ({"tool_choice": "none"}, "- - 0"),
        ({"reasoning_effort": "none"}, "none False 1"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"thinking": 7}}, "low 7 1"),
        ({"tool_choice": {"function": {"name": "f"}}}, None),
        ({"reasoning": {"effort": "low"}}, None),
        ({"continue_final_message": True}, None),
    ],
)
def test_fields_that_change_a_chat_count(
    folder: Path, more: dict[str, Any], rendered: str | None
) -> None:
    """A server is asked with each of them; the template has them as SGLang gives them to it."""
    body = CHAT | more
    assert ask_of(parse_body(json.dumps(body).encode())) == body | {"model": "default"}
    source = "{{ reasoning_effort|default('-') }} {{ thinking|default('-') }} {{ tools|count }}"
    (folder / "chat_template.jinja").write_text(source.replace("tools|", "(tools or [])|"))
    assert encoded(folder, body) == (None if rendered is None else [*rendered.encode()])


@pytest.mark.parametrize("more", [{}, {"description": "d"}, {"strict": None}, {"strict": True}])
def test_tools_are_rendered_as_a_server_does(folder: Path, more: dict[str, Any]) -> None:
    """What comes behind the first tool would count as held by nobody."""
    from sglang.srt.entrypoints.openai.protocol import Tool

    tool = {"type": "function", "function": TOOL["function"] | more}
    (folder / "chat_template.jinja").write_text("{{ tools|tojson }}")
    told = json.dumps([Tool(**tool).model_dump()], ensure_ascii=False)
    assert encoded(folder, CHAT | {"tools": [tool]}) == [*told.encode()]
