"""Names of a tenant or a conversation in a request's body, put back where an endpoint of SGLang
drops them, and carried to the schedulers.

SGLang's own endpoints and OpenAI's know ``extra_key``, ``cache_salt``, ``session_id`` and ``rid``.
Those of Anthropic's and Ollama's API build SGLang's request without them, so a salted prompt would
share pages with everybody's. ``conversation_id`` is known to ``/generate`` alone. All of them hand
the HTTP request on to the tokenizer manager, where what its body names is put back. So are what a
gateway says in headers (``x-override-*``), which SGLang reads at ``/generate`` and for chats only.

SGLang takes a ``conversation_id`` and does not pass it on. It passes on a request's KV hints
untouched, for tiers alone to read. The id travels as one of those, so every rank knows it and any
number of tokenizer processes will do. ``session_id``, which SGLang passes on itself, serves where
there is no other, and so does the id of a streaming session.
"""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from sglang.srt.entrypoints.request_headers import apply_header_overrides
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import GenerateReqInput

MAX_ID_BYTES = 512
"""Longer ids are not remembered; their requests are served like all others."""

_ACTION, _VERSION = "sglang_tiered.conversation", "1"


_TENANT = ("extra_key", "cache_salt")
_IDS = ("session_id", "conversation_id", "rid")


def after_tokenizing(tokenized: Any, request: Any) -> None:
    """Hand on the id of a request that has one. In the process that tokenizes."""
    from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope

    found = _usable(getattr(request, "conversation_id", None))
    if found is None:
        return
    action = KvHintAction(
        action_id="", action_type=_ACTION, action_version=_VERSION, payload={"id": found}
    )
    hints = tokenized.kv_hints or KvHintsEnvelope(protocol_version="1", message_id="")
    tokenized.kv_hints = KvHintsEnvelope(
        protocol_version=hints.protocol_version,
        message_id=hints.message_id,
        actions=[*hints.actions, action],
    )


def conversation_of(req: Any) -> str | None:
    """Return the id of a scheduler's request, or None. What a client sends as a hint of ours counts
    less than its ``conversation_id``."""
    hints = getattr(req, "kv_hints", None)
    for action in reversed(hints.actions if hints is not None else []):
        if action.action_type == _ACTION and action.action_version == _VERSION:
            return _usable(action.payload.get("id"))
    session = getattr(req, "session", None)
    return _usable(req.session_id) or _usable(getattr(session, "session_id", None))


def _usable(value: Any) -> str | None:
    if not isinstance(value, str) or not value:
        return None
    try:
        return value if len(value.encode()) <= MAX_ID_BYTES else None
    except UnicodeEncodeError:  # half a character, which no message to a scheduler can hold
        return None


class BodyRefused(HTTPException, ValueError):
    """Answered with 400 and one sentence: some endpoints catch one of its classes, others the
    other."""

    def __init__(self, sentence: str) -> None:
        super().__init__(400, sentence)

    def __str__(self) -> str:
        return str(self.detail)


def take_overrides(request: Any, raw_request: Any) -> None:
    """Take what the headers of a request say, if the operator allows that at all. The request is
    one of SGLang's that generates; others stay. Raises ``BodyRefused`` for what is no number."""
    headers = getattr(raw_request, "headers", None)
    if headers is None or not envs.SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES.get():
        return
    if isinstance(request, GenerateReqInput):
        try:
            apply_header_overrides(request, headers)
        except HTTPException as error:
            raise BodyRefused(str(error.detail)) from error


def carry(request: Any, raw_request: Any) -> None:
    """Give SGLang's request the names of its HTTP body that its endpoint dropped.

    request: what is about to be tokenized; names it has already stay. raw_request: Starlette's
    request, whose body the endpoint has read; None or one without a body has no names. Raises
    ``BodyRefused`` where a tenant is named that the request cannot carry, or not by a text.
    """
    body = _body_of(raw_request)
    rows = body.get("instances")
    for row in rows if isinstance(rows, list) else ():  # of Vertex, whose names are of all rows
        if isinstance(row, dict) and any(row.get(name) for name in _TENANT):
            raise BodyRefused(
                "extra_key or cache_salt is in one of the instances, where it separates nothing; "
                "pass it in parameters."
            )
    for name in _TENANT:
        value = body.get(name)
        if not value or getattr(request, name, None):
            continue
        if not isinstance(request, GenerateReqInput):
            raise BodyRefused(
                f"{name} cannot separate tenants here, since this endpoint's prompts share one "
                f"cache; leave it out, or use an endpoint that generates."
            )
        if not isinstance(value, str):
            raise BodyRefused(f"{name} is {value!r:.40}, not a text.")
        setattr(request, name, value)
    for name in _IDS:
        value = body.get(name)
        if isinstance(value, str) and value and getattr(request, name, "known") is None:
            setattr(request, name, value)


def _body_of(raw_request: Any) -> dict[str, Any]:
    """The parsed body that an endpoint has read, without waiting; empty where there is none."""
    read = getattr(raw_request, "json", None)
    if read is None:  # an engine in a program, or gRPC, whose messages hold no unknown names
        return {}
    reading = read()
    try:
        reading.send(None)
    except StopIteration as done:  # it was read before, so nothing was waited for
        return done.value if isinstance(done.value, dict) else {}
    except (RuntimeError, ValueError, RecursionError):  # a form, or no JSON
        return {}
    reading.close()
    return {}
