"""The conversation that a request belongs to, carried from the HTTP process to the schedulers.

SGLang takes a ``conversation_id`` and does not pass it on. It passes on a request's KV hints
untouched, for tiers alone to read. The id travels as one of those, so every rank knows it and any
number of tokenizer processes will do. ``session_id``, which SGLang passes on itself, serves where
there is no other, and so does the id of a streaming session.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MAX_ID_BYTES", "after_tokenizing", "conversation_of"]

MAX_ID_BYTES = 512
"""Longer ids are not remembered; their requests are served like all others."""

_ACTION, _VERSION = "sglang_tiered.conversation", "1"


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
