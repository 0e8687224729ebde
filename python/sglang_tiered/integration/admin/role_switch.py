"""``around_switch``: drains a server before SGLang switches its role, in the process of HTTP.

SGLang's ``/pd_role_switch`` refuses while anything runs. Routers learn from ``/tier/costs`` that
the server drains, and send it nothing new. What still comes when they all know is refused with 503,
which a router sends elsewhere: it would reach a scheduler of the other role, or hold up the drain.
Once its requests have ended, and what waits for NVMe is stored, the server switches. One that is
not empty in time keeps its role and serves on.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_tiered.integration.admin.keys import ordered_role
from sglang_tiered.policy.server_costs import FRESH_S, IN_PROGRESS, NOT_IDLE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["ClosedDoor", "around_switch", "is_draining", "refuse_while_closed"]

TOLD_S = FRESH_S + 0.5
"""After that every picker knows, or takes the server for silent: nobody tells it that a mirrored
request was refused."""
DRAINED_S = 120.0
LOOK_S = 0.1  # SGLang logs each refusal

_DRAINS, _CLOSED = "_sglang_tiered_drains", "_sglang_tiered_closed"

_CLOSES = "this server changes its role and takes no request now: ask another one"


def is_draining(manager: Any) -> bool:
    """Whether a router should send this server (SGLang's ``TokenizerManager``) nothing new."""
    return bool(manager.gracefully_exit or getattr(manager, _DRAINS, False))


def refuse_while_closed(manager: Any, request: Any) -> None:
    """Raise ``HTTPException`` 503 for a new request that would meet the switch. SGLang's checks of
    health, which are requests too, tell an orchestrator that the server lives."""
    if not getattr(manager, _CLOSED, False):
        return
    from fastapi import HTTPException
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    if not str(request.rid).startswith(HEALTH_CHECK_RID_PREFIX):
        raise HTTPException(503, _CLOSES, {"Retry-After": "1"})


class ClosedDoor:
    """An ASGI application around SGLang's, that refuses requests as ``refuse_while_closed`` does.
    SGLang makes many a streamed answer's head before it looks at the request, and a router sends no
    request elsewhere that was answered with 200."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and _asks_model(scope["path"]):
            from fastapi.responses import JSONResponse
            from sglang.srt.entrypoints.http_server import get_global_state

            state = get_global_state()
            if state is not None and getattr(state.tokenizer_manager, _CLOSED, False):
                refusal = JSONResponse({"error": _CLOSES}, 503, {"Retry-After": "1"})
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _asks_model(path: str) -> bool:
    return path.startswith(("/generate", "/v1/", "/api/"))


async def around_switch(
    original: Callable[..., Awaitable[Any]], manager: Any, message: Any, request: Any = None
) -> Any:
    """Switch once the server is empty. What can never be is refused at once, as SGLang does."""
    asked = msgspec.structs.replace(message, prepare_only=True)
    answer = await original(manager, asked, request)
    if request is not None and ordered_role(request.headers) not in ("", message.new_role):
        answer.success, answer.message = False, "the key is one for another role"
        return answer
    if message.prepare_only or answer.old_role == answer.new_role:
        return answer
    if not answer.success and NOT_IDLE not in answer.message:
        return answer
    if getattr(manager, _DRAINS, False):
        answer.success, answer.message = False, IN_PROGRESS
        return answer
    until = time.monotonic() + DRAINED_S
    setattr(manager, _DRAINS, True)
    try:
        await asyncio.sleep(TOLD_S)
        setattr(manager, _CLOSED, True)
        while time.monotonic() < until:
            if not manager.rid_to_state:
                answer = await original(manager, message, request)
                if answer.success or NOT_IDLE not in answer.message:
                    return answer
            await asyncio.sleep(LOOK_S)
        answer.success, answer.safe_to_restore = False, True
        answer.message = f"{NOT_IDLE}: it was not drained within {DRAINED_S:.0f} s; ask again"
        return answer
    finally:  # nothing is rolled back, so a switch that failed half way leaves a server of no role
        serves = answer.success or answer.safe_to_restore
        setattr(manager, _DRAINS, not serves)
        setattr(manager, _CLOSED, not serves)
