"""The endpoints of the tiers in SGLang's HTTP server: routes, JSON and statuses alone. Their API
keys are those of ``/flush_cache``; ``GET /tier/costs`` also takes one that opens nothing else
(``keys``).

A refusal is ``{"error": SENTENCE}`` with the status of its ``bodies.CallError``.
``docs/openapi.json`` describes all of it; ``scripts/write_openapi.py`` writes that file.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request, Response  # noqa: TC002 - FastAPI reads them out of annotations
from fastapi.responses import JSONResponse

from sglang_tiered.integration.admin.bodies import CallError, parse_limit
from sglang_tiered.integration.admin.costs import abort_rooms, event_source, server_costs
from sglang_tiered.integration.admin.newest import newest_requests
from sglang_tiered.integration.admin.role_switch import ClosedDoor, is_draining
from sglang_tiered.integration.admin.service import TierService
from sglang_tiered.policy.server_costs import ABANDONED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from fastapi import FastAPI

    from sglang_tiered.config import TieredConfig
    from sglang_tiered.integration.admin.cost_board import CostBoard
    from sglang_tiered.integration.admin.service import Report

    Call = Callable[[TierService, Any], Awaitable[Report]]
    Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]

__all__ = ["add_routes"]

_MAX_DIGITS = 10  # of a token in a query: Python refuses to read thousands

_NUM_REQUESTS = 20

_CALLS: dict[str, tuple[tuple[str, ...], Call]] = {
    "purge": (("POST",), TierService.purge),
    "checkpoint": (("POST",), TierService.checkpoint),
    "residency": (("GET", "POST"), TierService.residency),
    "forget": (("POST",), TierService.forget),
    "tenants": (("GET",), TierService.tenants),
    "pin": (("POST",), TierService.pin),
    "unpin": (("POST",), TierService.unpin),
    "conversations": (("GET",), TierService.conversations),
    "prefetch": (("POST",), TierService.prefetch),
}
"""The calls by the last part of their path: how they may be asked, and who answers."""


def add_routes(app: FastAPI, board: CostBoard, config: TieredConfig) -> None:
    """Add the endpoints. Call it once, before the server listens. The schedulers write their costs
    to ``board``, which the caller keeps open."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    app.add_middleware(ClosedDoor)
    guarded = auth_level(AuthLevel.ADMIN_OPTIONAL)

    def add(name: str, methods: tuple[str, ...], endpoint: Endpoint) -> None:
        app.add_api_route(
            f"/tier/{name}", guarded(endpoint), methods=list(methods), response_model=None
        )

    for name, (methods, call) in _CALLS.items():
        add(name, methods, _endpoint(call))
    add("costs", ("GET",), _costs_endpoint(board, config))
    add("requests", ("GET",), _requests_endpoint(config))


def _manager() -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


def _endpoint(call: Call) -> Endpoint:
    """Return the handler of one call."""

    async def endpoint(request: Request) -> Response:
        try:
            body = _query(request) if request.method == "GET" else await _json(request)
            report = await call(TierService(_manager()), body)
        except CallError as error:
            return JSONResponse({"error": str(error)}, status_code=error.status)
        return JSONResponse(report.body, status_code=report.status)

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


def _requests_endpoint(config: TieredConfig) -> Endpoint:
    """Return the handler of ``/tier/requests``, which reads files on a thread. One look at a time:
    a disk that hangs may not take the threads that name look-ups and others want."""
    look = asyncio.Lock()

    async def requests(request: Request) -> Response:
        try:
            limit = parse_limit({"limit": _NUM_REQUESTS, **_query(request)})["limit"]
            if look.locked():
                raise CallError("the lines are being read for somebody else; ask again", 503)
            async with look:
                answer = await asyncio.to_thread(newest_requests, config.request_log, limit)
        except CallError as error:
            return JSONResponse({"error": str(error)}, status_code=error.status)
        return JSONResponse(answer)

    return requests


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
    """Return query parameters as a body; ``input_ids`` are separated by commas, and what is no
    token is -1."""
    body: dict[str, Any] = dict(request.query_params)
    if "input_ids" in body:
        words = [word.strip() for word in body["input_ids"].split(",")]
        are_numbers = [word.isdecimal() and len(word) <= _MAX_DIGITS for word in words]
        body["input_ids"] = [
            int(word) if is_number else -1
            for word, is_number in zip(words, are_numbers, strict=True)
        ]
    return body
