"""The endpoints of the tiers in SGLang's HTTP server: routes, JSON and statuses. Their API keys are
those of ``/flush_cache``; ``GET /tier/costs`` also takes one that opens nothing else (``keys``). A
refusal is ``{"error": SENTENCE}`` with the status of its ``api.CallError``.

``GET /tier/requests`` is answered here, from the end of the files of ``--tier-log-requests``. They
are read when it is asked: no scheduler takes part, and nothing is kept while nobody asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request, Response  # noqa: TC002 - FastAPI reads them out of annotations
from fastapi.responses import JSONResponse

from sglang_tiered.api import (
    CALLS,
    Call,
    CallError,
    CostsCall,
    LastMinute,
    LoggedRequest,
    NewestRequests,
    RequestsCall,
    decode,
)
from sglang_tiered.integration.admin.costs import abort_rooms, event_source, server_costs
from sglang_tiered.integration.admin.role_switch import ModelDoor, is_draining
from sglang_tiered.integration.admin.service import Report, TierService
from sglang_tiered.policy.server_costs import ABANDONED
from sglang_tiered.request_log import VERSION, RequestRecord, Sources, older
from sglang_tiered.tools.explain.causes import cause

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from pathlib import Path

    from fastapi import FastAPI

    from sglang_tiered.config import TieredConfig
    from sglang_tiered.integration.admin.cost_board import CostBoard
    from sglang_tiered.request_log import RequestLogConfig

    Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]

__all__ = ["TAIL_BYTES", "add_routes", "newest_requests"]


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


MINUTE_S = 60.0

TAIL_BYTES = 1 << 20
"""What is read of all replicas' lines: about 1,700 of them, in some forty milliseconds."""

NOT_LOGGED = (
    "this server writes no line of its requests; start it with --tier-log-requests FILE to see them"
)


def newest_requests(
    config: RequestLogConfig | None, limit: int, *, now: float | None = None
) -> NewestRequests:
    """Return the last ``limit`` requests, the newest first, and the minute before ``now`` (Unix
    time). Reads at most ``TAIL_BYTES``. Raises ``CallError`` (404) where no lines are written."""
    if config is None:
        raise CallError(NOT_LOGGED, 404)
    since = (time.time() if now is None else now) - MINUTE_S
    records: list[RequestRecord] = []
    is_whole = True
    for replica in range(config.num_replicas):
        found, has_more = _tail(config.file_of(replica), TAIL_BYTES // config.num_replicas)
        records += found
        is_whole &= not has_more or any(_ended_at(record) < since for record in found)
    records.sort(key=_ended_at, reverse=True)
    minute = [record for record in records if _ended_at(record) >= since]
    sums = {
        name: sum(getattr(record.tokens, name) for record in minute)
        for name in Sources.__struct_fields__
    }
    return NewestRequests(
        tuple(
            LoggedRequest(**msgspec.structs.asdict(record), why=cause(record))
            for record in records[:limit]
        ),
        LastMinute(**sums, num_requests=len(minute), is_whole=is_whole),
    )


def _ended_at(record: RequestRecord) -> float:
    return record.arrived_unix_s + record.total_s


def _tail(path: Path, num_bytes: int) -> tuple[list[RequestRecord], bool]:
    """Return the records at the end of a replica's files, and whether there are earlier ones."""
    data, has_more, newest = b"", False, None
    for file in (path, older(path)):
        with contextlib.suppress(OSError), file.open("rb") as opened:
            found = os.fstat(opened.fileno())
            if newest == (found.st_dev, found.st_ino):  # renamed since it was read
                break
            newest = found.st_dev, found.st_ino
            start = max(0, found.st_size - (num_bytes - len(data)))
            opened.seek(start)
            part = opened.read(num_bytes - len(data))
            if start:
                has_more = True
                part = part.partition(b"\n")[2]  # no half line
            data = part + data
        if has_more:
            break
    records = []
    for line in data.splitlines():
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            record = msgspec.json.decode(line, type=RequestRecord)
            if record.v == VERSION:
                records.append(record)
    return records, has_more
