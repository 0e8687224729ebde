"""What routers may do to a server: keys that open one call alone, and switches of its role, in the
process of HTTP.

A key is made of the operator's: of ``GET /tier/costs``, or of one order by
``POST /pd_role_switch``, which each process of a server takes once.

SGLang's ``/pd_role_switch`` refuses while anything runs, so the server is drained first. Routers
learn from ``/tier/costs`` that the server drains, and send it nothing new. What still comes when
they all know is refused with 503, which a router sends elsewhere: it would reach a scheduler of the
other role, or hold up the drain. Once its requests have ended, and what waits for NVMe is stored,
the server switches. One that is not empty in time keeps its role and serves on.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_tiered.policy.server_costs import (
    COSTS_CALL,
    FRESH_S,
    IN_PROGRESS,
    NOT_IDLE,
    SWITCH_CALL,
    costs_key,
    order_of,
    switch_key,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping


TOLD_S = FRESH_S + 0.5
"""After that every picker knows, or takes the server for silent: nobody tells it that a mirrored
request was refused."""
DRAINED_S = 120.0
LOOK_S = 0.1  # SGLang logs each refusal

_CLOSES = "this server changes its role and takes no request now: ask another one"
_MODEL_PATHS = ("/generate", "/v1/", "/api/", "/encode", "/classify", "/invocations", "/vertex_")
_BEARER = "Bearer "
_boot = ""
_orders: set[str] = set()
"""The start of this server, and the keys for orders to it that were used."""


def take_orders(boot: str) -> None:
    """Have this process take keys for orders to this start of its server."""
    global _boot  # noqa: PLW0603
    _boot = boot
    _orders.clear()


def around_auth(decide: Callable[..., Any], **told: Any) -> Any:
    """Wrap SGLang's ``decide_request_auth``: for its call a key that is made of the operator's is
    as good as that. It does not see the role that is asked for: ``around_switch`` does."""
    from sglang.srt.runtime_context import get_serving

    operator = told["admin_api_key"] or told["api_key"]
    given = told["authorization_header"] or ""
    path = told["path"].removeprefix(get_serving().fastapi_root_path or "")
    call, wanted = f"{told['method']} {path}", ""
    if operator and call == COSTS_CALL:
        wanted = costs_key(operator)
    elif operator and call == SWITCH_CALL and (order := order_of(given.removeprefix(_BEARER))):
        role, until_s = order
        if time.time() < until_s and _boot and given not in _orders:
            wanted = switch_key(operator, _boot, role, until_s)
    if wanted and hmac.compare_digest(
        given.encode("utf-8", "surrogateescape"), f"{_BEARER}{wanted}".encode()
    ):
        told["authorization_header"] = f"{_BEARER}{operator}"
        if call == SWITCH_CALL:
            _orders.add(given)
    return decide(**told)


def ordered_role(headers: Mapping[str, str]) -> str:
    """Return the role that the key of a request to switch is for; nothing for an operator's."""
    order = order_of(headers.get("authorization", "").removeprefix(_BEARER))
    return order[0] if order else ""


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


def model_door(app: Any) -> Any:
    """Return an ASGI application around SGLang's: it refuses requests to the model while it is
    shut, and counts those inside, for which a switch waits. SGLang sends the head of a streamed
    answer before it looks at the request, and a router sends no request elsewhere that was answered
    with 200."""

    async def door(scope: Any, receive: Any, send: Any) -> None:
        from sglang.srt.entrypoints.http_server import get_global_state

        server = get_global_state()
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        asks_model = scope["type"] == "http" and path.startswith(_MODEL_PATHS)
        if server is None or not asks_model or scope["method"] == "GET":
            await app(scope, receive, send)
            return
        state = _Switch.of(server.tokenizer_manager)
        if state.is_shut:
            from fastapi.responses import JSONResponse

            refusal = JSONResponse({"error": _CLOSES}, 503, {"Retry-After": "1"})
            await refusal(scope, receive, send)
            return
        state.num_inside += 1
        try:
            await app(scope, receive, send)
        finally:
            state.num_inside -= 1

    return door


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
