"""What the calls of the tiers take: each ``parse_*`` returns a body that the schedulers understand.

Bodies come from JSON, from a query, or from a program in the same process; nothing in them is
trusted. Everything here runs in the process that serves HTTP and knows neither HTTP nor SGLang.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = [
    "CallError",
    "check_num_tokens",
    "cursor_of",
    "parse_forget",
    "parse_limit",
    "parse_listing",
    "parse_pin",
    "parse_prefetch",
    "parse_purge",
    "parse_selector",
    "parse_unpin",
]

_MAX_TOKENS = 1 << 22
_MAX_CHARACTERS = 4 * _MAX_TOKENS  # of a text, before it is tokenized
_LIMIT, _MAX_LIMIT = 100, 1000
_MAX_SHOWN = 40
_MAX_NAME_BYTES = 512  # of pins and conversations
_MAX_TTL_S = 10 * 365 * 86_400
_TENANT = ("extra_key", "cache_salt")
_SOURCES = ("rid", "conversation_id", "text", "input_ids")
_MAX_WAIT_S = 30
_TIERS = ("nvme", "object")
_MAX_CURSOR = 1 << 18  # characters: a name for each data-parallel rank
_CURSOR = re.compile(r"r[0-9]{1,18}|p[in].+", re.DOTALL)


class CallError(ValueError):
    """Raised for a call that is refused. Its text is one sentence.

    status: 400 what the caller sent, 404 what is not known, 409 beyond a bound. 500 a failure in a
    scheduler, 503 what may go well if it is asked again.
    """

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.status = status


def parse_selector(body: Any, *, with_tier: bool, besides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a body that selects one prefix; the caller judges the fields ``besides``. Raises
    ``CallError``."""
    known = {*_SOURCES, *_TENANT, *(("tier",) if with_tier else ())}
    given = _checked(body, sorted(known.union(besides)))
    sources = [name for name in _SOURCES if name in given]
    if len(sources) != 1:
        raise CallError(f"pass exactly one of {', '.join(_SOURCES)}")
    if "input_ids" in given:
        if not _are_tokens(given["input_ids"]):
            raise CallError("input_ids must be a list of token numbers that is not empty")
        check_num_tokens(given["input_ids"], "input_ids")
    _check_texts(given, known - {"input_ids"})
    _check_name(given, "conversation_id")
    _check_length(len(given.get("text", "")), "text", "characters", _MAX_CHARACTERS)
    if given.get("tier", "nvme") not in _TIERS:
        shown = repr(given["tier"][:_MAX_SHOWN])
        raise CallError(f"tier {shown} is unknown; choose one of {', '.join(_TIERS)}")
    return given


def parse_forget(body: Any) -> dict[str, Any]:
    """Return what to forget, with how much of it to keep. Raises ``CallError``."""
    given = parse_selector(body, with_tier=False, besides=("keep_tokens",))
    keep = given.setdefault("keep_tokens", 0)
    if type(keep) is not int or not 0 <= keep <= _MAX_TOKENS:
        raise CallError(f"keep_tokens {_shown(keep)} must be a number from 0 to {_MAX_TOKENS}")
    return given


def parse_pin(body: Any) -> dict[str, Any]:
    """Return what to pin. Raises ``CallError``."""
    given = parse_selector(body, with_tier=True, besides=("name", "ttl"))
    _check_name(given, "name")
    ttl = given.get("ttl", 1)
    if type(ttl) not in (int, float) or not 0 < ttl <= _MAX_TTL_S:
        raise CallError(f"ttl {_shown(ttl)} must be seconds, more than 0, at most {_MAX_TTL_S}")
    return given


def parse_prefetch(body: Any) -> tuple[dict[str, Any], float]:
    """Return which prefix to bring to host memory, and for how long to wait for it. Raises
    ``CallError``."""
    given = parse_selector(body, with_tier=False, besides=("wait_s",))
    wait_s = given.pop("wait_s", 0)
    if type(wait_s) not in (int, float) or not 0 <= wait_s <= _MAX_WAIT_S:
        shown = _shown(wait_s)
        raise CallError(f"wait_s {shown} must be seconds, at least 0, at most {_MAX_WAIT_S}")
    return given, float(wait_s)


def parse_unpin(body: Any) -> dict[str, Any]:
    """Return what to unpin: a name and its tenant, or a prefix. Raises ``CallError``."""
    if not isinstance(body, dict) or "name" not in body:
        return parse_selector(body, with_tier=False)
    given = _of_tenant(body, "name")
    _check_name(given, "name")
    return given


def parse_purge(body: Any) -> dict[str, Any]:
    """Return what to purge. Raises ``CallError``, also for an empty body: it must not purge
    everything."""
    given = _of_tenant(body, "all")
    if "all" in given and given != {"all": True}:
        raise CallError('"all" must be true, and stand alone')
    if not given:
        raise CallError('pass extra_key, cache_salt or both, or "all": true')
    return given


def parse_limit(body: Any) -> dict[str, Any]:
    """Return how many to list at most. Raises ``CallError``."""
    if not isinstance(body, dict) or not body.keys() <= {"limit"}:
        raise CallError("pass limit, a number, and nothing else")
    return {"limit": _limit(body)}


def parse_listing(body: Any) -> dict[str, Any]:
    """Return whose conversations to list, how many, and ``after`` which: a cursor for each
    data-parallel rank, None where nothing is left. Raises ``CallError``."""
    given = _of_tenant(body, "limit", "after")
    _check_texts(given, {"after"})
    after = _cursors(given["after"]) if "after" in given else {}
    return {**given, "limit": _limit(given), "after": after}


def _of_tenant(body: Any, *besides: str) -> dict[str, Any]:
    """Return a body with the keys of a tenant, and fields ``besides`` that the caller judges."""
    given = _checked(body, (*_TENANT, *besides))
    _check_texts(given, _TENANT)
    return given


def _checked(body: Any, known: Collection[str]) -> dict[str, Any]:
    """Return a copy of a body that has known fields only. Raises ``CallError``."""
    if not isinstance(body, dict):
        raise CallError("the body must be a JSON object")
    if unknown := sorted(body.keys() - {*known}):
        shown = repr(unknown[0][:_MAX_SHOWN])
        raise CallError(f"{shown} is unknown here; pass {', '.join(known)}")
    return dict(body)


def _check_texts(body: dict[str, Any], names: Collection[str]) -> None:
    for name, value in body.items():
        if name in names and (problem := _problem(name, value)) is not None:
            raise CallError(problem)


def cursor_of(cursors: dict[str, str | None]) -> str | None:
    """Return what is to be passed as ``after`` for the next page; None if there is none."""
    if all(cursor is None for cursor in cursors.values()):
        return None
    return base64.urlsafe_b64encode(json.dumps(cursors).encode()).decode().rstrip("=")


def _limit(body: dict[str, Any]) -> int:
    passed = limit = body.get("limit", _LIMIT)
    if isinstance(limit, str) and re.fullmatch("[0-9]{1,10}", limit):  # of a query
        limit = int(limit)
    if type(limit) is not int or not 1 <= limit <= _MAX_LIMIT:
        raise CallError(f"limit {_shown(passed)} must be a number from 1 to {_MAX_LIMIT}")
    return limit


def _shown(value: Any) -> str:
    try:
        return repr(value)[:_MAX_SHOWN]
    except ValueError:  # Python prints no number of more than 4,300 digits
        return "of too many digits"


def _cursors(after: str) -> dict[str, str | None]:
    found = None
    if len(after) <= _MAX_CURSOR:
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(base64.urlsafe_b64decode(after + "=" * (-len(after) % 4)))
    if not isinstance(found, dict) or not all(
        cursor is None or (isinstance(cursor, str) and _CURSOR.fullmatch(cursor))
        for cursor in found.values()
    ):
        raise CallError(f"after {after[:_MAX_SHOWN]!r} is not what an answer gave as next")
    return found


def _check_name(body: dict[str, Any], field: str) -> None:
    _check_texts(body, {field})
    if (length := len(body.get(field, "").encode())) > _MAX_NAME_BYTES:
        raise CallError(f"{field} has {length} bytes, more than {_MAX_NAME_BYTES}; shorten it")


def check_num_tokens(tokens: list[int], name: str) -> None:
    """Refuse more tokens than a call may name. Raises ``CallError``."""
    _check_length(len(tokens), name, "tokens", _MAX_TOKENS)


def _check_length(length: int, name: str, unit: str, limit: int) -> None:
    if length > limit:
        raise CallError(f"{name} has {length} {unit}, more than {limit}; pass the beginning of it")


def _problem(name: str, value: Any) -> str | None:
    """Return what is wrong with a value that must be a text, or None."""
    if not isinstance(value, str) or not value:
        return f"{name} must be a text that is not empty"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])
        return (
            f"{name} has {half} at character {error.start}, half of a surrogate pair, which no "
            "text in UTF-8 holds; pass the whole character"
        )
    return None


def _are_tokens(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(type(token) is int and 0 <= token < 1 << 31 for token in value)
