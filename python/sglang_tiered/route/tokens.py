"""``LocalTokenizer``: a model's tokenizer and chat template, without the library that loads its
weights. ``TokenReader``: a body to a prompt, in threads, within a time."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from sglang_tiered.errors import ConfigError
from sglang_tiered.route.prompt import BYTES_PER_TOKEN, Body, Prompt, ask_of, parse_body, prompt_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence
    from pathlib import Path

    Ask = Callable[[dict[str, Any], str], Awaitable[Sequence[int] | None]]


_FUNCTION = ("name", "description", "parameters")  # of a tool
_RARE = ("reasoning", "continue_final_message", "thinking", "task")

NUM_THREADS = 4
MAX_WAITING = 32
"""Prompts in threads at once; further ones go by their bytes."""
MAX_READ_BYTES, MAX_TEXT_BYTES = 8 << 20, 1 << 20
"""Larger bodies go by their bytes; larger ones without tokens too. A million tokens, and a quarter
of one."""

logger = logging.getLogger(__name__)


class LocalTokenizer:
    """Of a directory with ``tokenizer.json``, and ``tokenizer_config.json`` for chats. Any thread.
    Raises ``ConfigError``."""

    def __init__(self, directory: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
            self._tokenizer.no_truncation()  # which a training may have saved in there
            self._tokenizer.no_padding()
        except Exception as error:  # the library raises ``Exception`` itself
            raise ConfigError(
                f"--tokenizer {directory} has no tokenizer.json that can be read ({error}); name "
                "the model's directory, or drop it."
            ) from error
        self._templates: dict[str, jinja2.Template] = {}
        self._names: dict[str, str] = {}
        try:
            config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
            source = config.get("chat_template")
            apart = directory / "chat_template.jinja"
            if apart.exists():
                source = apart.read_text(encoding="utf-8")
            if isinstance(source, str):
                source = [{"name": "default", "template": source}]
            for one in source or ():
                self._templates[one["name"]] = _environment().from_string(one["template"])
            for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
                token = config.get(name)
                self._names[name] = token["content"] if isinstance(token, dict) else token or ""
        except Exception as error:  # whatever is wrong with a file
            raise ConfigError(
                f"--tokenizer {directory} has no chat template that can be read ({error}); name "
                "the model's directory, or drop it."
            ) from error

    def encode(self, asked: dict[str, Any]) -> list[int] | None:
        """Return the tokens of what a server would be asked for (``ask_of``), as it finds them;
        None for what is not only text, has no template, or seldom occurs."""
        is_chat = "messages" in asked
        text = self._render(asked) if is_chat else asked["prompt"]
        if text is None:
            return None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=not is_chat).ids
        return ids

    def _render(self, asked: dict[str, Any]) -> str | None:
        choice, effort = asked.get("tool_choice"), asked.get("reasoning_effort")
        is_rare = any(asked.get(name) is not None for name in _RARE)
        tools = None if choice == "none" else asked.get("tools") or None
        template = (tools and self._templates.get("tool_use")) or self._templates.get("default")
        if template is None or is_rare or isinstance(choice, dict):
            return None
        more: dict[str, Any] = {**self._names, "add_generation_prompt": True}
        if effort is not None:  # as SGLang names it to templates
            more |= dict.fromkeys(("thinking", "enable_thinking"), effort != "none")
            more["reasoning_effort"] = effort
        if isinstance(told := asked.get("chat_template_kwargs"), dict):
            more |= told
        try:
            messages = [_flat(message) for message in asked["messages"]]
            if messages[-1]["role"] == "assistant":
                if not isinstance(asked["messages"][-1].get("content"), str):
                    return None
                messages[-1] = {"role": "user", "content": messages[-1]["content"]}  # as SGLang
            tools = tools and [_tool(each) for each in tools]
            return template.render(**more, messages=messages, tools=tools)
        except (jinja2.TemplateError, LookupError, ValueError, TypeError, AttributeError):
            return None  # the server says what is wrong with it


def _flat(message: Any) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("not only text")
        content = " ".join(part["text"] for part in content)
    told = {name: value for name, value in message.items() if value is not None}
    made = {**told, "content": "" if content is None else content}
    if isinstance(calls := message.get("tool_calls"), list):
        made["tool_calls"] = [{**call, "function": _parsed(call["function"])} for call in calls]
    return made


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as SGLang's records of a request write it for templates."""
    told = {k: v for k, v in tool["function"].items() if k != "strict" or v is not None}
    if not (tool.keys() <= {"type", "function"} and told.keys() <= {*_FUNCTION, "strict"}):
        raise ValueError("a tool with more than its function")
    blank = {name: None for name in _FUNCTION if name not in told}
    return {"type": tool.get("type", "function"), "function": told | blank, "defer_loading": None}


def _parsed(function: dict[str, Any]) -> dict[str, Any]:
    """Templates have the arguments of a call as an object."""
    told = function.get("arguments")
    return {**function, "arguments": json.loads(told)} if isinstance(told, str) else function


def _environment() -> jinja2.Environment:
    """As chat templates expect it."""

    def refuse(sentence: str) -> None:
        raise jinja2.TemplateError(sentence)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    made.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


class TokenReader:
    """Makes prompts of bodies. ``ask`` gets the tokens of a text from a server, with the client's
    key, where there is no tokenizer. Of one event loop; ``close`` it."""

    def __init__(
        self,
        tokenizer: LocalTokenizer | None,
        ask: Ask,
        budget_s: float,
        page_sizes: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._tokenizer, self._ask, self._budget_s = tokenizer, ask, budget_s
        self._page_sizes = page_sizes
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tokens")
        self._num_running = 0
        self.num_late = 0
        """Prompts that went by their bytes, for want of time."""

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(
        self, data: bytes, path: str, authorization: str = "", *, may_ask: bool = True
    ) -> Prompt:
        """Return the prompt of a body, which may be no JSON at all. ``may_ask``: whether a server
        may be asked for its tokens."""
        guess = Prompt(max(1, len(data) // BYTES_PER_TOKEN))
        if not data:
            return guess
        if self._num_running >= MAX_WAITING or len(data) > MAX_READ_BYTES:
            self.num_late += 1
            return guess
        self._num_running += 1
        work = asyncio.ensure_future(self._make(data, path, authorization, may_ask))
        work.add_done_callback(self._done)
        try:
            async with asyncio.timeout(self._budget_s):
                return await asyncio.shield(work)
        except TimeoutError:
            self.num_late += 1
            return guess
        except Exception as error:  # a tokenizer's own: a prompt that is not known is served too
            logger.debug("the tokens of a prompt are not known: %r", error)
            return guess

    def _done(self, work: asyncio.Future[Prompt]) -> None:
        self._num_running -= 1
        if not work.cancelled():
            work.exception()  # that nobody may wait for

    async def _make(self, data: bytes, path: str, authorization: str, may_ask: bool) -> Prompt:
        """In threads, as the event loop has no time for that."""
        work = partial(asyncio.get_running_loop().run_in_executor, self._threads)
        sizes = self._page_sizes()
        made = await work(self._read, data, path, sizes)
        if isinstance(made, Prompt):
            return made
        body, asked = made
        ids = await self._ask(asked, authorization) if may_ask else None
        return await work(_named, body, len(data), path, ids, sizes)

    def _read(
        self, data: bytes, path: str, sizes: Collection[int]
    ) -> Prompt | tuple[Body, dict[str, Any]]:
        """Return the prompt, or what a server is to be asked for it."""
        body, ids = parse_body(data), None
        asked = ask_of(body, path) if len(data) <= MAX_TEXT_BYTES else None
        if asked is not None:
            if self._tokenizer is None:
                return body, asked
            ids = self._tokenizer.encode(asked)
        return _named(body, len(data), path, ids, sizes)


def _named(
    body: Body, num_bytes: int, path: str, ids: Sequence[int] | None, sizes: Collection[int]
) -> Prompt:
    prompt = prompt_of(body, num_bytes, path, ids)
    for size in sizes:
        prompt.keys(size)
    return prompt
