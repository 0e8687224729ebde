"""What a picker needs of a request's body: tokens, the names of its pages, and how it is answered.

A page's name in KV events is 64 bits of a SHA-256 chain over its tokens, as SGLang computes it.
With ``extra_key`` or ``cache_salt`` it is hashed once more with both, as in the events' format
``dynamo``. So tenants are apart, and of a server with the other format their pages are not known.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    Fingerprints = npt.NDArray[np.uint64]


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


class Body(msgspec.Struct):
    """The fields of ``/generate`` and of OpenAI's calls that matter here. Any may hold anything:
    the server says what is wrong with a request."""

    input_ids: Any = None
    text: Any = None
    prompt: Any = None
    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    reasoning: Any = None
    reasoning_effort: Any = None
    continue_final_message: Any = None
    chat_template_kwargs: Any = None
    thinking: Any = None
    task: Any = None
    extra_key: Any = None
    cache_salt: Any = None
    lora_path: Any = None
    model: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    sampling_params: Any = None


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


def parse_body(data: bytes) -> Body:
    """Parse a body. Raises ``ValueError`` for what is no JSON object."""
    try:
        return msgspec.json.decode(data, type=Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def ask_of(body: Body, path: str = "/generate") -> dict[str, Any] | None:
    """Return what ``POST /v1/tokenize`` is asked for this prompt, of a batch its first; None where
    it holds tokens, or nothing that call takes."""
    if body.input_ids is not None or path not in (*STREAMS, "/generate"):
        return None
    model = body.model if isinstance(body.model, str) else "default"
    if isinstance(body.messages, list):
        fields = {name: getattr(body, name) for name in CHAT_FIELDS}
        return {"model": model} | {key: value for key, value in fields.items() if value is not None}
    text = _first(body.prompt if body.text is None else body.text)
    return {"model": model, "prompt": text} if isinstance(text, str) else None


def _first(value: Any) -> Any:
    """Of a batch its first."""
    return value[0] if isinstance(value, list) and value and not _is_ids(value) else value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and type(value[0]) is int


def prompt_of(body: Body, num_bytes: int, path: str, ids: Sequence[int] | None = None) -> Prompt:
    """Make a prompt of a body: of the ids in it, else of ``ids``, which its text is."""
    found = _first(body.prompt if body.input_ids is None else body.input_ids)
    if _is_ids(found):
        ids = found
    prompt = Prompt(max(1, num_bytes // BYTES_PER_TOKEN))
    if ids is not None and _names_are_known(body):
        try:
            prompt.ids = array("I", ids)
            prompt.num_tokens = max(1, len(prompt.ids))
        except (OverflowError, TypeError):
            prompt.ids = None
    prompt.extra_key, prompt.cache_salt = body.extra_key, body.cache_salt
    sampling = body.sampling_params if isinstance(body.sampling_params, dict) else {}
    for bound in (body.max_completion_tokens, body.max_tokens, sampling.get("max_new_tokens")):
        if isinstance(bound, int) and bound > 0:
            prompt.max_new = bound
            break
    prompt.is_stream = body.stream is True and path in STREAMS
    return prompt


def _names_are_known(body: Body) -> bool:
    """An adapter is a part of the names that only its server knows; lists of tenants are of
    batches."""
    texts = (body.extra_key, body.cache_salt)
    has_adapter = body.lora_path or (isinstance(body.model, str) and ":" in body.model)
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
