"""The endpoints of the tiers in SGLang's HTTP server: routes, JSON and statuses alone. Their API
keys are those of ``/flush_cache``; ``GET /tier/costs`` also takes one that opens nothing else
(``keys``).

A refusal is ``{"error": SENTENCE}`` with the status of its ``api.CallError``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request, Response  # noqa: TC002 - FastAPI reads them out of annotations
from fastapi.responses import JSONResponse

from sglang_tiered.api import CALLS, Call, CallError, CostsCall, RequestsCall, decode
from sglang_tiered.integration.admin.costs import abort_rooms, event_source, server_costs
from sglang_tiered.integration.admin.newest import newest_requests
from sglang_tiered.integration.admin.role_switch import ModelDoor, is_draining
from sglang_tiered.integration.admin.service import Report, TierService
from sglang_tiered.policy.server_costs import ABANDONED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from fastapi import FastAPI

    from sglang_tiered.config import TieredConfig
    from sglang_tiered.integration.admin.cost_board import CostBoard

    Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]

__all__ = ["add_routes"]


def add_routes(app: FastAPI, board: CostBoard, config: TieredConfig) -> None:
    """Add the endpoints. Call it once, before the server listens. The schedulers write their costs
    to ``board``, which the caller keeps open."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    app.add_middleware(ModelDoor)
    guarded = auth_level(AuthLevel.ADMIN_OPTIONAL)
    others = {
        CostsCall: _costs_endpoint(board, config),
        RequestsCall: _endpoint(RequestsCall, _newest(config)),
    }
    for call in CALLS:
        endpoint = others.get(call) or _endpoint(call, _ask_schedulers)
        app.add_api_route(
            call.path, guarded(endpoint), methods=list(call.methods), response_model=None
        )


def _manager() -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


async def _ask_schedulers(call: Call) -> Report:
    return await TierService(_manager()).answer(call)


def _endpoint(call: type[Call], answer: Callable[[Any], Awaitable[Report]]) -> Endpoint:
    """Return the handler of one call, which ``answer`` answers."""

    async def endpoint(request: Request) -> Response:
        is_query = request.method == "GET"
        try:
            body = _query(request) if is_query else await _json(request)
            report = await answer(decode(call, body, is_query=is_query))
        except CallError as error:
            report = Report(error.status, {"error": str(error)})
        body = msgspec.json.encode(report.body)
        return Response(body, report.status, media_type="application/json")

    return endpoint


def _costs_endpoint(board: CostBoard, config: TieredConfig) -> Endpoint:
    """Return the handler of ``/tier/costs``, which reads memory only. It hears there of requests
    that were given up, too."""

    async def costs(request: Request) -> Response:
        manager = _manager()
        abort_rooms(manager, request.headers.get(ABANDONED, ""))
        draining, events = is_draining(manager), event_source(manager.server_args)
        try:
            answer = server_costs(board, config, draining=draining, events=events)
        except CallError as error:
            again = {"Retry-After": "1"} if error.status == 503 else None
            part = {  # what a router must know of a server without costs
                "disaggregation_mode": manager.disaggregation_mode.value,
                "disaggregation_bootstrap_port": manager.server_args.disaggregation_bootstrap_port,
                "draining": draining,
            }
            return JSONResponse({"error": str(error), **part}, error.status, again)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return costs


def _newest(config: TieredConfig) -> Callable[[RequestsCall], Awaitable[Report]]:
    """Return what answers ``/tier/requests``, which reads files on a thread. One look at a time:
    a disk that hangs may not take the threads that name look-ups and others want."""
    look = asyncio.Lock()

    async def newest(call: RequestsCall) -> Report:
        if look.locked():
            raise CallError("the lines are being read for somebody else; ask again", 503)
        async with look:
            found = await asyncio.to_thread(newest_requests, config.request_log, call.limit)
        return Report(200, found)

    return newest


async def _json(request: Request) -> Any:
    """Return the parsed body. Raises ``CallError``."""
    try:
        return await request.json()
    except RecursionError:
        raise CallError(
            "the body is nested too deeply; pass a JSON object of texts and token numbers"
        ) from None
    except ValueError as error:
        raise CallError(f"the body is not JSON ({error}); pass a JSON object") from None


def _query(request: Request) -> dict[str, Any]:
    """Return query parameters as a body; ``input_ids`` are separated by commas."""
    body: dict[str, Any] = dict(request.query_params)
    if "input_ids" in body:
        body["input_ids"] = [word.strip() for word in body["input_ids"].split(",")]
    return body
