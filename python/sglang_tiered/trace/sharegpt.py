"""ShareGPT conversations: ``{"id", "conversations": [{"from", "value"}]}``.

The file has no times, no tokens and no ids of blocks. A conversation becomes one request per
answer: the prompt is everything before it, written as ``_HEADER``, text and ``_FOOTER`` a message,
and the header of the answer. Token counts and ids come from ``trace.text``; ``arrival_s`` stays
``None`` until ``trace.arrivals`` gives times.

As people download it, the file is not clean. What cannot be used is said row by row:

* no turns, a missing key, a value that is no text, an unknown speaker: the row is skipped;
* an answer before any question, two answers in a row, a question without an answer: the row is
  used without what no request can be made of (repaired): leading answers are dropped, as FastChat's
  own scripts do, consecutive answers are joined, a last question is dropped;
* two questions in a row are one prompt, and a system message is part of it: nothing is missing;
* lone surrogates are counted as the three bytes each would take.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_tiered.trace.request import TraceRequest
from sglang_tiered.trace.tally import BadRowError
from sglang_tiered.trace.text import PromptChain, Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["decode"]

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
}
_HEADER = "<|{}|>\n"
_FOOTER = "\n"

Turn = tuple[str, str]  # role and text


def decode(data: bytes, number: int, tokens: Tokens) -> tuple[list[TraceRequest], str | None]:
    """The requests of one row, in turn order, and what was left out, if anything. ``number`` names
    the conversation where the row has no id. Raises ``BadRowError``."""
    name, turns = _turns(_parse(data))
    turns, problem = _answerable(turns)
    if not any(role == "assistant" for role, _ in turns):
        raise BadRowError(problem or "it has no answer")
    conversation = name if name is not None else f"row-{number}"
    return list(_requests(turns, conversation, tokens)), problem


def _parse(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # lone surrogates are no error to the standard library
    except RecursionError as error:
        raise BadRowError("it is nested too deeply") from error
    try:
        return json.loads(data)
    except RecursionError as error:
        raise BadRowError("it is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise BadRowError(f"byte {error.start} of it is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise BadRowError(f"it is not JSON: {error.msg} at character {error.pos} of it") from error
    except ValueError as error:  # an integer of thousands of digits
        raise BadRowError(f"it is not JSON: {error}") from error


def _turns(row: Any) -> tuple[str | None, list[Turn]]:
    if not isinstance(row, dict):
        raise BadRowError(f"it is {_kind(row)}, not an object")
    messages = row.get("conversations", row.get("conversation"))
    if messages is None:
        raise BadRowError("it has no conversations")
    if not isinstance(messages, list):
        raise BadRowError(f"its conversations are {_kind(messages)}, not a list")
    if not messages:
        raise BadRowError("its list of conversations is empty")
    name = row.get("id")
    turns = [_turn(message, place) for place, message in enumerate(messages, start=1)]
    return name if isinstance(name, str) and name else None, turns


def _turn(message: Any, place: int) -> Turn:
    if not isinstance(message, dict):
        raise BadRowError(f"message {place} is {_kind(message)}, not an object")
    for key in ("from", "value"):
        if key not in message:
            raise BadRowError(f"message {place} has no {key!r}")
        if not isinstance(message[key], str):
            raise BadRowError(f"the {key!r} of message {place} is {_kind(message[key])}, not text")
    role = _ROLES.get(message["from"].strip().lower())
    if role is None:
        raise BadRowError(f"message {place} is from {message['from'][:20]!r}, which is no speaker")
    return role, message["value"]


def _answerable(turns: list[Turn]) -> tuple[list[Turn], str | None]:
    """The turns that make requests, with consecutive answers joined."""
    kept: list[Turn] = []
    problem = None
    asked = False
    for role, text in turns:
        if role == "assistant" and not asked:
            problem = problem or "it begins with an answer"
        elif role == "assistant" and kept[-1][0] == "assistant":
            problem = problem or "it has two answers in a row"
            kept[-1] = (role, kept[-1][1] + text)
        else:
            asked = asked or role == "user"
            kept.append((role, text))
    while kept and kept[-1][0] != "assistant":
        if kept.pop()[0] == "user":
            problem = problem or "its last question has no answer"
    return kept, problem


def _requests(turns: list[Turn], conversation: str, tokens: Tokens) -> Iterator[TraceRequest]:
    prompt = PromptChain(tokens)
    turn = 0
    for role, text in turns:
        prompt.append(_HEADER.format(role))
        if role == "assistant":
            turn += 1
            output = len(tokens.to_bytes(text))
            yield TraceRequest(
                arrival_s=None,
                input_length=prompt.num_tokens,
                output_length=-(-output // tokens.bytes_per_token),
                block_ids=prompt.block_ids(),
                block_tokens=tokens.block_tokens,
                conversation=conversation,
                turn=turn,
            )
        prompt.append(text + _FOOTER)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"
