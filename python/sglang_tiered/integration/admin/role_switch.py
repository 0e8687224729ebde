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


TOLD_S = FRESH_S + 0.5
"""After that every picker knows, or takes the server for silent: nobody tells it that a mirrored
request was refused."""
DRAINED_S = 120.0
LOOK_S = 0.1  # SGLang logs each refusal

_CLOSES = "this server changes its role and takes no request now: ask another one"
_MODEL_PATHS = ("/generate", "/v1/", "/api/", "/encode", "/classify", "/invocations", "/vertex_")


class _Switch:
    """Of one server, on its ``TokenizerManager``; the thread of its event loop alone uses it."""

    drains = is_shut = False
    num_inside = 0

    @classmethod
    def of(cls, manager: Any) -> _Switch:
        state: _Switch = vars(manager).setdefault("_sglang_tiered_switch", cls())
        return state


def is_draining(manager: Any) -> bool:
    """Whether a router should send this server (SGLang's ``TokenizerManager``) nothing new."""
    return bool(manager.gracefully_exit or _Switch.of(manager).drains)


class ModelDoor:
    """An ASGI application around SGLang's: refuses requests to the model while it is shut, and
    counts those inside, for which a switch waits. SGLang sends the head of a streamed answer before
    it looks at the request, and a router sends no request elsewhere that was answered with 200."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from sglang.srt.entrypoints.http_server import get_global_state

        server = get_global_state()
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        asks_model = scope["type"] == "http" and path.startswith(_MODEL_PATHS)
        if server is None or not asks_model or scope["method"] == "GET":
            await self._app(scope, receive, send)
            return
        state = _Switch.of(server.tokenizer_manager)
        if state.is_shut:
            from fastapi.responses import JSONResponse

            refusal = JSONResponse({"error": _CLOSES}, 503, {"Retry-After": "1"})
            await refusal(scope, receive, send)
            return
        state.num_inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            state.num_inside -= 1


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
    state = _Switch.of(manager)
    if state.drains:
        answer.success, answer.message = False, IN_PROGRESS
        return answer
    until = time.monotonic() + DRAINED_S
    state.drains = True
    try:
        await asyncio.sleep(TOLD_S)
        state.is_shut = True
        while time.monotonic() < until:
            if not manager.rid_to_state and not state.num_inside:
                answer = await original(manager, message, request)
                if answer.success or NOT_IDLE not in answer.message:
                    return answer
            await asyncio.sleep(LOOK_S)
        answer.success, answer.safe_to_restore = False, True
        answer.message = f"{NOT_IDLE}: it was not drained within {DRAINED_S:.0f} s; ask again"
        return answer
    finally:  # nothing is rolled back, so a switch that failed half way leaves a server of no role
        state.drains = state.is_shut = not (answer.success or answer.safe_to_restore)
