"""Conversations: ``{"id", "conversations": [{"from", "value"}]}``, and what else people write.

The tables below are the forms: where a row has its messages (``forms.LIST_KEYS``; or it is the list
itself), how a message names who speaks and what is said, and who the speakers are. Text may come
in parts. A conversation becomes one request per answer: the prompt is everything before it,
written as ``_HEADER``, text and ``_FOOTER`` a message, and the header of the answer. Token counts
and ids come from ``trace.text``; ``arrival_s`` stays ``None`` until ``trace.arrivals`` gives times.

A row that ends with a question and says how long an answer may be (``output_length``,
``max_tokens``) is one request, as clients record them; a list of such (``payloads``) is several.

As people download it, a file is not clean. What cannot be used is said row by row:

* no turns, or no answer to a question: the row is dropped;
* a message without text, without a speaker, or from an unknown one: the row is used up to there;
  a system prompt or what a tool said may be empty;
* an answer before any question, two answers in a row, a question without an answer: the row is
  used without what no request can be made of (repaired): leading answers are dropped, as FastChat's
  own scripts do, consecutive answers are joined, a last question is dropped;
* two questions in a row are one prompt; what the system or a tool said is part of it, and a call of
  a tool is an answer: nothing is missing;
* lone surrogates are counted as the three bytes each would take.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import xxhash

from sglang_tiered_lab.trace.clock import Clock
from sglang_tiered_lab.trace.forms import LIST_KEYS
from sglang_tiered_lab.trace.request import MAX_LENGTH, TraceRequest
from sglang_tiered_lab.trace.tally import BadRowError
from sglang_tiered_lab.trace.text import PromptChain, Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_tiered_lab.trace.rows import Row


_SPEAKERS = {
    "user": ("human", "user", "prompter"),
    "assistant": (
        *("gpt", "chatgpt", "assistant", "model", "bing", "bard", "ai", "bot", "claude"),
        *("function_call", "tool_call", "tool_calls"),
    ),
    "system": ("system", "developer"),
    "tool": ("tool", "function", "observation", "function_response", "tool_response", "ipython"),
}
_ROLES = {name: role for role, names in _SPEAKERS.items() for name in names}
_SPEAKER_KEYS = ("from", "role")
_TEXT_KEYS = ("value", "content", "text")
_CALL_KEYS = ("tool_calls", "function_call")
_NAME_KEYS = ("id", "conversation_id", "session_id")
_OUTPUT_KEYS = ("output_length", "max_completion_tokens", "max_tokens")
_MAY_BE_EMPTY = ("system", "tool")
_HEADER = "<|{}|>\n"
_FOOTER = "\n"

Turn = tuple[str, str]  # role and text


class _Request(NamedTuple):
    """What one prompt is made of; the last turn is the answer, or how many tokens it has."""

    turns: list[Turn]
    num_output: int
    time_s: float | None
    delay_s: float | None


class ConversationReader:
    """Reads the rows of one file, in their order."""

    note = None

    def __init__(self, tokens: Tokens, *, has_times: bool = False) -> None:
        self._tokens = tokens
        self._clock = Clock(has_times=has_times)

    def decode(self, row: Row) -> tuple[list[TraceRequest], BadRowError | None]:
        """The requests of a row, in turn order, and what was left out, if anything. The row's
        number names the conversation where it has no id. Raises ``BadRowError``."""
        value = _parse(row.data)
        name = _name(value) or row.name or f"row-{row.number}"
        payloads = value.get("payloads") if isinstance(value, dict) else None
        if isinstance(payloads, list) and payloads:
            recorded = [_recorded(payload, *_turns(payload)) for payload in payloads]
            if None in recorded:
                raise BadRowError("one of its payloads is no request")
            found = [self._request(one, name, turn) for turn, one in enumerate(recorded, 1) if one]
            return found, None
        turns, problem = _turns(value)
        if (one := _recorded(value, turns, problem)) is not None:
            return [self._request(one, name, None)], None
        turns, odd = _answerable(turns)
        problem = problem or odd
        if not any(role == "assistant" for role, _ in turns):
            raise problem or BadRowError("it has no answer")
        return list(self._conversation(turns, name)), problem

    def _conversation(self, turns: list[Turn], name: str) -> Iterator[TraceRequest]:
        prompt = PromptChain(self._tokens)
        turn = 0
        for role, text in turns:
            prompt.append(_HEADER.format(role))
            if role == "assistant":
                turn += 1
                num_output = len(self._tokens.to_bytes(text))
                yield TraceRequest(
                    arrival_s=None,
                    input_length=prompt.num_tokens,
                    output_length=-(-num_output // self._tokens.bytes_per_token),
                    block_ids=prompt.block_ids(),
                    block_tokens=self._tokens.block_tokens,
                    conversation=name,
                    turn=turn,
                )
            prompt.append(text + _FOOTER)

    def _request(self, recorded: _Request, name: str, turn: int | None) -> TraceRequest:
        prompt = PromptChain(self._tokens)
        for role, text in recorded.turns:
            prompt.append(_HEADER.format(role) + text + _FOOTER)
        prompt.append(_HEADER.format("assistant"))
        return TraceRequest(
            arrival_s=self._clock.arrival_s(name, recorded.time_s, recorded.delay_s),
            input_length=prompt.num_tokens,
            output_length=recorded.num_output,
            block_ids=prompt.block_ids(),
            block_tokens=self._tokens.block_tokens,
            conversation=name,
            turn=turn,
            delay_s=recorded.delay_s,
        )


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
        raise BadRowError("it is not UTF-8", f"byte {error.start} of it") from error
    except json.JSONDecodeError as error:
        where = f"{error.msg} at character {error.pos} of it"
        raise BadRowError("it is not JSON", where) from error
    except ValueError as error:  # an integer of thousands of digits
        raise BadRowError("it is not JSON", str(error)) from error


def _name(row: Any) -> str | None:
    if isinstance(row, dict):
        for key in _NAME_KEYS:
            name = row.get(key)
            if isinstance(name, str | int) and not isinstance(name, bool) and name != "":
                return str(name)
    return None


def _turns(row: Any) -> tuple[list[Turn], BadRowError | None]:
    """The messages up to the first that is none, and what is wrong with that."""
    messages = row
    if isinstance(row, dict):
        messages = next((row[key] for key in LIST_KEYS if row.get(key) is not None), None)
        if messages is None:
            raise BadRowError("it has no conversations")
        if not isinstance(messages, list):
            raise BadRowError(f"its conversations are {_kind(messages)}, not a list")
    elif not isinstance(row, list):
        raise BadRowError(f"it is {_kind(row)}, not an object")
    if not messages:
        raise BadRowError("its list of conversations is empty")
    turns = []
    for place, message in enumerate(messages, start=1):
        try:
            turns.append(_turn(message))
        except BadRowError as error:
            return turns, BadRowError(error.reason, f"message {place}")
    return turns, None


def _turn(message: Any) -> Turn:
    if not isinstance(message, dict):
        raise BadRowError(f"a message is {_kind(message)}, not an object")
    key = next((key for key in _SPEAKER_KEYS if key in message), None)
    if key is None:
        raise BadRowError(f"a message has no {' or '.join(map(repr, _SPEAKER_KEYS))}")
    speaker = message[key]
    if not isinstance(speaker, str):
        raise BadRowError(f"the {key!r} of a message is {_kind(speaker)}, not text")
    role = _ROLES.get(speaker.strip().lower().replace("-", "_"))
    if role is None:
        raise BadRowError(f"a message is from {speaker[:20]!r}, which is no speaker")
    calls = next((message[key] for key in _CALL_KEYS if message.get(key)), None)
    said = "" if calls is None else json.dumps(calls)
    key = next((key for key in _TEXT_KEYS if key in message), None)
    if key is None and not said:
        raise BadRowError(f"a message has no {' or '.join(map(repr, _TEXT_KEYS))}")
    value = None if key is None else message[key]
    if value is None:
        if not said and role not in _MAY_BE_EMPTY:
            raise BadRowError(f"the {key!r} of a message is null, not text")
        return role, said
    text = _text(value)
    if text is None:
        raise BadRowError(f"the {key!r} of a message is {_kind(value)}, not text")
    return role, text + said


def _text(value: Any) -> str | None:
    """Of a message, whole or in parts; ``None`` where it is neither."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = [_part(part) for part in value]
        return None if None in parts else "".join(part for part in parts if part)
    if isinstance(value, dict) and isinstance(value.get("parts"), list):
        return _text(value["parts"])
    return None


def _part(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return None
    for key in ("text", "content"):
        if isinstance(part.get(key), str):
            return str(part[key])
    # An image or the like: equal ones are equal, and nothing is known of their tokens.
    digest = xxhash.xxh3_64_hexdigest(json.dumps(part, sort_keys=True).encode())
    return f"<{part.get('type', 'part')} {digest}>"


def _recorded(row: Any, turns: list[Turn], problem: BadRowError | None) -> _Request | None:
    """The request that a row is which ends without an answer but says how long one may be."""
    if problem is not None or not isinstance(row, dict) or turns[-1][0] == "assistant":
        return None
    num_output = next((row[key] for key in _OUTPUT_KEYS if row.get(key) is not None), None)
    if not isinstance(num_output, int) or not 0 <= num_output <= MAX_LENGTH:
        return None
    return _Request(turns, num_output, _seconds(row, "timestamp"), _seconds(row, "delay"))


def _seconds(row: dict[str, Any], key: str) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e15:
        raise BadRowError(f"its {key} is no number of milliseconds")
    return value / 1000


def _answerable(turns: list[Turn]) -> tuple[list[Turn], BadRowError | None]:
    """The turns that make requests, with consecutive answers joined."""
    kept: list[Turn] = []
    problem = None
    asked = False
    for role, text in turns:
        if role == "assistant" and not asked:
            problem = problem or BadRowError("it begins with an answer")
        elif role == "assistant" and kept[-1][0] == "assistant":
            problem = problem or BadRowError("it has two answers in a row")
            kept[-1] = (role, kept[-1][1] + text)
        else:
            asked = asked or role in ("user", "tool")
            kept.append((role, text))
    while kept and kept[-1][0] != "assistant":
        if kept.pop()[0] in ("user", "tool"):
            problem = problem or BadRowError("its last question has no answer")
    return kept, problem


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
