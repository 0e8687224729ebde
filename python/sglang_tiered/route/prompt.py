"""A request's body to a ``Prompt``: tokens, the names of its pages, and how it is answered.

``TokenReader`` makes it in threads, within a time: by ``LocalTokenizer``, a model's tokenizer and
chat template without the library that loads its weights, or by asking a server.

A page's name in KV events is 64 bits of a SHA-256 chain over its tokens, as SGLang computes it.
With ``extra_key`` or ``cache_salt`` it is hashed once more with both, as in the events' format
``dynamo``. So tenants are apart, and of a server with the other format their pages are not known.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
import logging
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
import numpy as np
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from sglang_tiered.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    Fingerprints = npt.NDArray[np.uint64]
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

STREAMS = ("/v1/chat/completions", "/v1/completions")
"""Calls of which the head of a stream comes with the first token, of all others at once. Theirs and
``/generate``'s are the texts that are made tokens; those of others hold more than is read here."""
BYTES_PER_TOKEN = 4
"""Of a prompt whose tokens are not known."""
MAX_NAMED_PAGES = 1 << 14
"""Of a prompt; what lies beyond counts as computed."""
MAX_NEW_TOKENS = 256
"""Of an answer whose bound is not in the request: what choosing a decode server counts on."""
CHAT_FIELDS = (
    *("messages", "tools", "tool_choice", "reasoning", "reasoning_effort"),
    *("continue_final_message", "chat_template_kwargs", "thinking", "task"),
)
"""What a chat's tokens depend on."""


@dataclass(slots=True)
class Prompt:
    """``ids`` are None where only the length is known, by the bytes. ``max_new``: the most tokens
    of the answer. ``is_stream``: whether its head comes with the first token."""

    num_tokens: int
    ids: array[int] | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    max_new: int = MAX_NEW_TOKENS
    is_stream: bool = False
    _named: dict[int, tuple[list[int], Fingerprints]] = field(default_factory=dict)

    def keys(self, page_tokens: int) -> list[int]:
        """Return the names of the first whole pages of this size, empty if no token is known. Takes
        some milliseconds for each thousand, once."""
        return self._names(page_tokens)[0]

    def stored(self, page_tokens: int) -> Fingerprints:
        """Return the names of the same pages in the servers' stores."""
        return self._names(page_tokens)[1]

    def _names(self, page_tokens: int) -> tuple[list[int], Fingerprints]:
        if self.ids is None:
            return [], np.empty(0, "<u8")
        found = self._named.get(page_tokens)
        if found is None:
            ids = self.ids[: MAX_NAMED_PAGES * page_tokens]
            keys = page_keys(ids, page_tokens, self.extra_key, self.cache_salt)
            if self.extra_key is None and self.cache_salt is None:
                stored = np.array(keys, ">i8").view("<u8")
            else:
                stored = stored_keys(ids, page_tokens, self.extra_key, self.cache_salt)
            found = self._named[page_tokens] = keys, stored
        return found


def parse_body(data: bytes) -> dict[str, Any]:
    """Parse a body of ``/generate`` or of OpenAI's calls. Any field may hold anything: the server
    says what is wrong with a request. Raises ``ValueError`` for what is no JSON object."""
    try:
        body: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return body


def ask_of(body: Mapping[str, Any], path: str = "/generate") -> dict[str, Any] | None:
    """Return what ``POST /v1/tokenize`` is asked for this prompt, of a batch its first; None where
    it holds tokens, or nothing that call takes."""
    if body.get("input_ids") is not None or path not in (*STREAMS, "/generate"):
        return None
    model, text = body.get("model"), body.get("text")
    asked = {"model": model if isinstance(model, str) else "default"}
    if isinstance(body.get("messages"), list):
        return asked | {name: body[name] for name in CHAT_FIELDS if body.get(name) is not None}
    text = _first(body.get("prompt") if text is None else text)
    return {**asked, "prompt": text} if isinstance(text, str) else None


def _first(value: Any) -> Any:
    """Of a batch its first."""
    return value[0] if isinstance(value, list) and value and not _is_ids(value) else value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and type(value[0]) is int


def prompt_of(
    body: Mapping[str, Any], num_bytes: int, path: str, ids: Sequence[int] | None = None
) -> Prompt:
    """Make a prompt of a body: of the ids in it, else of ``ids``, which its text is."""
    found = body.get("input_ids")
    found = _first(body.get("prompt") if found is None else found)
    if _is_ids(found):
        ids = found
    prompt = Prompt(max(1, num_bytes // BYTES_PER_TOKEN))
    if ids is not None and _names_are_known(body):
        try:
            prompt.ids = array("I", ids)
            prompt.num_tokens = max(1, len(prompt.ids))
        except (OverflowError, TypeError):
            prompt.ids = None
    prompt.extra_key, prompt.cache_salt = body.get("extra_key"), body.get("cache_salt")
    bounds = [body.get("max_completion_tokens"), body.get("max_tokens")]
    if isinstance(sampling := body.get("sampling_params"), dict):
        bounds.append(sampling.get("max_new_tokens"))
    given = (bound for bound in bounds if isinstance(bound, int) and bound > 0)
    prompt.max_new = next(given, MAX_NEW_TOKENS)
    prompt.is_stream = body.get("stream") is True and path in STREAMS
    return prompt


def _names_are_known(body: Mapping[str, Any]) -> bool:
    """An adapter is a part of the names that only its server knows; lists of tenants are of
    batches."""
    model = body.get("model")
    has_adapter = body.get("lora_path") or (isinstance(model, str) and ":" in model)
    texts = (body.get("extra_key"), body.get("cache_salt"))
    return not has_adapter and all(text is None or isinstance(text, str) for text in texts)


def page_keys(
    ids: array[int], page_tokens: int, extra_key: str | None = None, cache_salt: str | None = None
) -> list[int]:
    """Return the names of whole pages in events, as signed 64 bits. ``ids``: uint32."""
    digest, cache_salt = b"", cache_salt or None  # as SGLang has it
    if cache_salt is not None:
        digest = hashlib.sha256(b"sglang-cache-salt-v1\0" + cache_salt.encode()).digest()
    seed = _tenant_seed(b"sglang-kv-event-namespace-v1", extra_key, cache_salt)
    keys = []
    for name in _chain(ids, page_tokens, digest):
        told = hashlib.sha256(seed + name).digest() if seed else name
        keys.append(int.from_bytes(told[:8], "big", signed=True))
    return keys


def stored_keys(
    ids: array[int], page_tokens: int, extra_key: str | None = None, cache_salt: str | None = None
) -> Fingerprints:
    """Return the names of whole pages in stores: the first 8 bytes of each, little-endian."""
    seed = _tenant_seed(b"sglang-cache-namespace-v1", extra_key, cache_salt or None)
    return np.frombuffer(b"".join(_chain(ids, page_tokens, seed)), "<u8")


def _chain(ids: array[int], page_tokens: int, digest: bytes) -> Iterator[bytes]:
    """The first 8 bytes of the hash of each whole page and all before it."""
    if sys.byteorder != "little":
        ids = array("I", ids)
        ids.byteswap()
    data, step = memoryview(ids).cast("B"), page_tokens * ids.itemsize
    for start in range(0, len(ids) // page_tokens * step, step):
        hashed = hashlib.sha256(digest)
        hashed.update(data[start : start + step])
        digest = hashed.digest()
        yield digest[:8]


def _tenant_seed(kind: bytes, extra_key: str | None, cache_salt: str | None) -> bytes:
    """Nothing without a tenant."""
    if extra_key is None and cache_salt is None:
        return b""
    digest = hashlib.sha256(kind)
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\0")
        else:
            encoded = part.encode()
            digest.update(b"\1" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


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
    ) -> Prompt | tuple[dict[str, Any], dict[str, Any]]:
        """Return the prompt, or what a server is to be asked for it."""
        body, ids = parse_body(data), None
        asked = ask_of(body, path) if len(data) <= MAX_TEXT_BYTES else None
        if asked is not None:
            if self._tokenizer is None:
                return body, asked
            ids = self._tokenizer.encode(asked)
        return _named(body, len(data), path, ids, sizes)


def _named(
    body: Mapping[str, Any],
    num_bytes: int,
    path: str,
    ids: Sequence[int] | None,
    sizes: Collection[int],
) -> Prompt:
    prompt = prompt_of(body, num_bytes, path, ids)
    for size in sizes:
        prompt.keys(size)
    return prompt
