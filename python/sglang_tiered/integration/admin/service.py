"""``answer``: asks the schedulers what a call wants, and makes one answer of theirs.

It runs on any asyncio loop of the process that has SGLang's tokenizer manager, and keeps nothing
between calls. It knows no HTTP: ``http_api`` is one caller, a program with an engine of its own
another.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
import uuid
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from sglang_tiered import api
from sglang_tiered.api import CallError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.managers.tokenizer_manager import TokenizerManager


CONTROL_PREFIX = "sglang_tiered."
"""Of the methods of control messages; SGLang's own debugger uses other names."""
TIMEOUT_S = 30.0
"""How long a call asks the schedulers until it answers what is missing."""

_POLL_S, _MAX_POLL_S = 0.02, 0.25
UNKNOWN = (
    "no recent request has this rid, and no recent request or pin this conversation_id; pass its "
    "text or input_ids"
)
NOT_FORGOTTEN = (
    "the pages are hidden here, but not every tier and every server has forgotten them for good; "
    "ask again"
)

Answer = dict[str, Any]

Report = tuple[int, Any]
"""Status and body of what a call answers: 200, or where it is not done yet 503 (ask again) or 202
(it goes on)."""

_Cursor = Annotated[str, msgspec.Meta(pattern=r"^(?:r[0-9]{1,18}|p[in](?s:.)+)\Z")] | None


async def answer(manager: TokenizerManager, call: api.Call) -> Report:
    """Ask every scheduler of a server, and make one answer of theirs, within ``TIMEOUT_S`` and a
    step of the schedulers. Raises ``CallError`` where the call is refused."""
    name = call.path.rpartition("/")[2]
    body = await _with_tokens(manager, msgspec.to_builtins(call))
    if name == "forget":
        return await _forget(manager, body)
    if name == "pin":
        body["now"] = time.time()  # one clock for all ranks
    elif name == "conversations":
        body["after"] = _cursors_in(body.get("after"))
    timeout_s = body.pop("wait_s", None)
    return _REPORTS[name](await _ask(manager, name, body, timeout_s=timeout_s))


async def _forget(manager: TokenizerManager, body: Answer) -> Report:
    """Forget a prefix in every tier and on every server."""
    number = uuid.uuid4().hex
    begun = await _ask(manager, "forget", body, number=number, timeout_s=0.0)
    _known(begun)
    asked = [_ask(manager, "forget", {}, number=number)]
    # Other replicas may hold pages of it too. The first answer of each names those it knows.
    pages = list(dict.fromkeys(each for told in begun for each in told.get("hashes", ())))
    if any(len(told.get("hashes", ())) < len(pages) for told in begun):
        asked.append(_ask(manager, "forget", {"hashes": pages}))
    answers, *others = await asyncio.gather(*asked)
    known = [*_known(answers), *(each for told in others for each in _not_failed(told))]
    report = {
        "durable": all(each["durable"] for each in known),
        "num_tokens": max(each["num_tokens"] for each in known),
    }
    if report["durable"]:
        return 200, report
    return 503, {"error": NOT_FORGOTTEN, **report}


async def _with_tokens(manager: TokenizerManager, body: Answer) -> Answer:
    """Return the body with ``input_ids`` in place of ``text``. Raises ``CallError``."""
    text = body.pop("text", None)
    if text is None:
        return body
    if manager.tokenizer is None:
        raise CallError("this server has no tokenizer; pass input_ids")
    # A long text takes a second, for which it must not block the streams of other requests.
    tokens = await asyncio.to_thread(manager.tokenizer.encode, text)
    if len(tokens) > api.MAX_TOKENS:
        raise CallError(
            f"text has {len(tokens)} tokens, more than {api.MAX_TOKENS}; pass the beginning"
        )
    return {**body, "input_ids": [int(token) for token in tokens]}


async def _ask(
    manager: TokenizerManager,
    method: str,
    body: Answer,
    *,
    number: str | None = None,
    timeout_s: float | None = None,
) -> list[Answer]:
    """Poll until all schedulers are done or the time is up; return one answer of each. ``number``:
    of a call that has begun."""
    from sglang.srt.managers.io_struct import DumperControlReqInput

    number = number or uuid.uuid4().hex
    message = {**body, "id": number}
    deadline = time.monotonic() + (TIMEOUT_S if timeout_s is None else timeout_s)
    pause_s = _POLL_S
    while True:
        replies = await manager.dumper_control(
            DumperControlReqInput(method=CONTROL_PREFIX + method, body=message)
        )
        answers: list[Answer] = []
        for reply in replies:
            failed = not reply.success
            answers += [{"error": reply.error, "status": 500}] if failed else reply.response
        if all(each.get("done", True) for each in answers) or time.monotonic() >= deadline:
            return answers
        message = {"id": number}  # by which each scheduler knows the call: a prompt is long
        await asyncio.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _MAX_POLL_S)


def _not_failed(answers: Sequence[Answer]) -> Sequence[Answer]:
    """Return the answers. Raises ``CallError`` with the gravest that is an error."""
    failed = [answer for answer in answers if "error" in answer]
    if failed:
        worst = max(failed, key=lambda answer: answer["status"] == 500)
        raise CallError(worst["error"], worst["status"])
    return answers


def _known(answers: Sequence[Answer]) -> Sequence[Answer]:
    """Return the answers of schedulers that know what was named, at least one. Raises
    ``CallError``, with what a scheduler said of it if one did."""
    known = [answer for answer in _not_failed(answers) if "unknown" not in answer]
    if not known:
        said = (answer["unknown"] for answer in answers if answer["unknown"] is not True)
        raise CallError(next(said, UNKNOWN), 404)
    return known


def _counted(answers: Sequence[Answer], what: str) -> Sequence[Answer]:
    if not all(answer["done"] for answer in _not_failed(answers)):
        raise CallError(f"{what} are still counted; ask again", 503)
    return answers


def _purged(answers: Sequence[Answer]) -> Report:
    durable = all(answer["durable"] for answer in _not_failed(answers))
    hidden = any(answer["in_memory"] == "hidden" for answer in answers)
    report = {"durable": durable, "in_memory": "hidden" if hidden else "gone"}
    return 200 if durable else 503, report


def _tenants(answers: Sequence[Answer]) -> Report:
    return 200, [answer["tenants"] for answer in _counted(answers, "tenants")]


def _page(answers: Sequence[Answer]) -> Report:
    """With data parallelism every scheduler gives up to ``limit`` rows; one that has no more gives
    none."""
    answers = _counted(answers, "conversations")
    page = {
        "conversations": [row for answer in answers for row in answer["conversations"]],
        "next": _cursor_of({str(answer["rank"]): answer["next"] for answer in answers}),
    }
    for name in ("pinned_bytes", "pin_bound_bytes"):
        page[name] = sum(answer[name] for answer in answers)
    return 200, page


def _best(answers: Sequence[Answer]) -> Report:
    """With data parallelism a conversation lives in one scheduler: report the best answer."""
    known = _known(answers)
    best = max(known, key=lambda answer: sum(v for v in answer.values() if type(v) is int))
    return 200, _without_done(next(filter(_is_durable, known), best))


def _durable(answers: Sequence[Answer]) -> Report:
    _, body = _best(answers)
    if "num_missing" not in body:
        raise CallError("a scheduler is still at the begin of it; ask again", 503)
    return 200 if any(map(_is_durable, answers)) else 503, body


def _unpinned(answers: Sequence[Answer]) -> Report:
    done = all(answer["done"] for answer in _known(answers))
    return 200 if done else 503, {"unpinned": done}


def _prefetched(answers: Sequence[Answer]) -> Report:
    """With data parallelism every replica loads what it finds, and has room for."""
    known = [a for a in answers if a.get("num_in_memory") or a.get("num_loading")]
    known = known or list(_known(answers))
    best = max(known, key=lambda answer: answer["num_in_memory"] + answer["num_loading"])
    return 200 if all(answer["done"] for answer in known) else 202, _without_done(best)


_REPORTS: dict[str, Callable[[Sequence[Answer]], Report]] = {
    "checkpoint": _durable,
    "residency": _best,
    "pin": _durable,
    "unpin": _unpinned,
    "prefetch": _prefetched,
    "purge": _purged,
    "tenants": _tenants,
    "conversations": _page,
}


def _is_durable(answer: Answer) -> bool:
    return bool(answer.get("done")) and answer.get("num_missing") == 0


def _without_done(answer: Answer) -> Answer:
    return {name: value for name, value in answer.items() if name != "done"}


def _cursor_of(cursors: dict[str, str | None]) -> str | None:
    """Return what is to be passed as ``after`` for the next page; None if there is none."""
    if all(cursor is None for cursor in cursors.values()):
        return None
    return base64.urlsafe_b64encode(json.dumps(cursors).encode()).decode().rstrip("=")


def _cursors_in(after: str | None) -> dict[str, str | None]:
    """Return a cursor for each data-parallel rank, None where nothing is left. Raises
    ``CallError``."""
    if after is None:
        return {}
    with contextlib.suppress(ValueError, msgspec.DecodeError, RecursionError):
        found = base64.urlsafe_b64decode(after + "=" * (-len(after) % 4))
        return msgspec.json.decode(found, type=dict[str, _Cursor])
    raise CallError(f"after {api.shown(after)} is not what an answer gave as next")
