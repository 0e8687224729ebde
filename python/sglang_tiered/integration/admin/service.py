"""``TierService``: asks the schedulers what a call wants, and makes one answer of theirs.

It runs on any asyncio loop of the process that has SGLang's tokenizer manager. It knows no HTTP:
``http_api`` is one caller, a program with an engine of its own another.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_tiered.integration.admin.bodies import (
    CallError,
    check_num_tokens,
    cursor_of,
    parse_forget,
    parse_limit,
    parse_listing,
    parse_pin,
    parse_prefetch,
    parse_purge,
    parse_selector,
    parse_unpin,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.managers.tokenizer_manager import TokenizerManager

__all__ = ["CONTROL_PREFIX", "TIMEOUT_S", "Report", "TierService"]

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
UNKNOWN_PIN = "there is no such pin"

Answer = dict[str, Any]


class Report(NamedTuple):
    """What a call answers: 200, or where it is not done yet 503 (ask again) or 202 (it goes on)."""

    status: int
    body: Any


class TierService:
    """The calls of one server. Each takes an untrusted body, answers within ``TIMEOUT_S`` and a
    step of the schedulers, and raises ``CallError`` where it is refused. It keeps nothing between
    calls; the manager is the caller's."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    async def purge(self, body: Any) -> Report:
        """Remove the pages of a tenant, or all pages, from every tier."""
        answers = _not_failed(await self._ask("purge", parse_purge(body)))
        durable = all(answer["durable"] for answer in answers)
        hidden = any(answer["in_memory"] == "hidden" for answer in answers)
        report = {"durable": durable, "in_memory": "hidden" if hidden else "gone"}
        return Report(200 if durable else 503, report)

    async def tenants(self, body: Any) -> Report:
        """List the tenants with the most bytes on NVMe, a list per scheduler."""
        answers = _not_failed(await self._ask("tenants", parse_limit(body)))
        _check_counted(answers, "tenants")
        return Report(200, [answer["tenants"] for answer in answers])

    async def checkpoint(self, body: Any) -> Report:
        """Make a prefix durable in a tier."""
        body = await self._with_tokens(parse_selector(body, with_tier=True))
        answers = await self._ask("checkpoint", body)
        return _best(answers, lambda answer: 200 if _is_durable(answer) else 503)

    async def residency(self, body: Any) -> Report:
        """Count the leading tokens of a prefix by tier."""
        body = await self._with_tokens(parse_selector(body, with_tier=False))
        return _best(await self._ask("residency", body), lambda _: 200)

    async def pin(self, body: Any) -> Report:
        """Keep a prefix in a tier, and make it durable there."""
        body = await self._with_tokens(parse_pin(body))
        body = {**body, "now": time.time()}  # one clock for all ranks
        answers = await self._ask("pin", body)
        return _best(answers, lambda answer: 200 if _is_durable(answer) else 503)

    async def unpin(self, body: Any) -> Report:
        """Let a pin go."""
        answers = await self._ask("unpin", await self._with_tokens(parse_unpin(body)))
        known = _known(answers, UNKNOWN_PIN)
        done = all(answer["done"] for answer in known)
        return Report(200 if done else 503, {"unpinned": done})

    async def conversations(self, body: Any) -> Report:
        """List the conversations of one tenant, a page at a time. With data parallelism every
        scheduler gives up to ``limit`` rows; one that has no more gives none."""
        answers = _not_failed(await self._ask("conversations", parse_listing(body)))
        _check_counted(answers, "conversations")
        return Report(
            200,
            {
                "conversations": [row for answer in answers for row in answer["conversations"]],
                "next": cursor_of({str(answer["rank"]): answer["next"] for answer in answers}),
                "pinned_bytes": sum(answer["pinned_bytes"] for answer in answers),
                "pin_bound_bytes": sum(answer["pin_bound_bytes"] for answer in answers),
            },
        )

    async def forget(self, body: Any) -> Report:
        """Forget a prefix in every tier and on every server."""
        body, number = await self._with_tokens(parse_forget(body)), uuid.uuid4().hex
        begun = await self._ask("forget", body, number=number, timeout_s=0.0)
        _known(begun, UNKNOWN)
        asked = [self._ask("forget", _later(body), number=number)]
        # Other replicas may hold pages of it too. The first answer of each names those it knows.
        pages = list(dict.fromkeys(each for answer in begun for each in answer.get("hashes", ())))
        if any(len(answer.get("hashes", ())) < len(pages) for answer in begun):
            asked.append(self._ask("forget", {"hashes": pages}))
        answers, *others = await asyncio.gather(*asked)
        known = [
            *_known(answers, UNKNOWN),
            *(each for told in others for each in _not_failed(told)),
        ]
        num_tokens = max(answer["num_tokens"] for answer in known)
        if all(answer["durable"] for answer in known):
            return Report(200, {"durable": True, "num_tokens": num_tokens})
        return Report(503, {"error": NOT_FORGOTTEN, "durable": False, "num_tokens": num_tokens})

    async def prefetch(self, body: Any) -> Report:
        """Bring a prefix that is about to be used to host memory."""
        body, wait_s = parse_prefetch(body)
        body = await self._with_tokens(body)
        answers = await self._ask("prefetch", body, timeout_s=wait_s)
        # With data parallelism every replica loads what it finds, and has room for.
        known = [a for a in answers if a.get("num_in_memory") or a.get("num_loading")]
        known = known or list(_known(answers, UNKNOWN))
        best = max(known, key=lambda answer: answer["num_in_memory"] + answer["num_loading"])
        is_done = all(answer["done"] for answer in known)
        return Report(200 if is_done else 202, _without_done(best))

    async def _with_tokens(self, body: Answer) -> Answer:
        """Return the body with ``input_ids`` in place of ``text``. Raises ``CallError``."""
        text = body.pop("text", None)
        if text is None:
            return body
        tokenizer = self._manager.tokenizer
        if tokenizer is None:
            raise CallError("this server has no tokenizer; pass input_ids")
        # A long text takes a second, for which it must not block the streams of other requests.
        tokens = await asyncio.to_thread(tokenizer.encode, text)
        check_num_tokens(tokens, "text")
        return {**body, "input_ids": [int(token) for token in tokens]}

    async def _ask(
        self,
        method: str,
        body: Answer,
        *,
        number: str | None = None,
        timeout_s: float | None = None,
    ) -> list[Answer]:
        """Poll until all schedulers are done or the time is up; return one answer of each.
        ``number``: of a call that has begun."""
        from sglang.srt.managers.io_struct import DumperControlReqInput

        number = number or uuid.uuid4().hex
        message = {**body, "id": number}
        deadline = time.monotonic() + (TIMEOUT_S if timeout_s is None else timeout_s)
        pause_s = _POLL_S
        while True:
            replies = await self._manager.dumper_control(
                DumperControlReqInput(method=CONTROL_PREFIX + method, body=message)
            )
            answers: list[Answer] = []
            for reply in replies:
                answers += (
                    reply.response if reply.success else [{"error": reply.error, "status": 500}]
                )
            done = all(answer.get("done", True) for answer in answers)
            if done or time.monotonic() >= deadline:
                return answers
            message = {**_later(body), "id": number}
            await asyncio.sleep(pause_s)
            pause_s = min(1.2 * pause_s, _MAX_POLL_S)


def _later(body: Answer) -> Answer:
    """Return what a later question repeats. A prompt or hashes may be long, and every scheduler
    knows the call by its number then, but where it knows no such ``rid``."""
    return {} if body.keys() & {"input_ids", "hashes"} else body


def _not_failed(answers: Sequence[Answer]) -> Sequence[Answer]:
    """Return the answers. Raises ``CallError`` with the gravest that is an error."""
    failed = [answer for answer in answers if "error" in answer]
    if failed:
        worst = max(failed, key=lambda answer: answer["status"] == 500)
        raise CallError(worst["error"], worst["status"])
    return answers


def _check_counted(answers: Sequence[Answer], what: str) -> None:
    if not all(answer["done"] for answer in answers):
        raise CallError(f"{what} are still counted; ask again", 503)


def _known(answers: Sequence[Answer], unknown: str) -> Sequence[Answer]:
    """Return the answers of schedulers that know what was named, at least one. Raises
    ``CallError``, with what a scheduler said of it if one did."""
    known = [answer for answer in _not_failed(answers) if "unknown" not in answer]
    if not known:
        said = (answer["unknown"] for answer in answers if answer["unknown"] is not True)
        raise CallError(next(said, unknown), 404)
    return known


def _best(answers: Sequence[Answer], status: Callable[[Answer], int]) -> Report:
    known = _known(answers, UNKNOWN)
    # With data parallelism a conversation lives in one scheduler: report the best answer.
    best = max(known, key=lambda answer: sum(v for v in answer.values() if type(v) is int))
    if any(_is_durable(answer) for answer in known):
        best = next(answer for answer in known if _is_durable(answer))
    return Report(status(best), _without_done(best))


def _is_durable(answer: Answer) -> bool:
    return bool(answer.get("done")) and answer.get("num_missing") == 0


def _without_done(answer: Answer) -> Answer:
    return {name: value for name, value in answer.items() if name != "done"}
