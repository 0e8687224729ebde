"""What SGLang's HTTP server answers of the tiers: endpoints, and a page for people.
Routes, JSON and statuses: a refusal is ``{"error": SENTENCE}`` with the status of its
``api.CallError``. API keys are those of ``/flush_cache``; ``GET /tier/costs`` also takes one that
opens nothing else (``role_switch``). Without keys a call is refused that comes from another site.

The page needs no key, as it holds nothing of a server (``README.md``). A browser never sends the
key that a reader types in by itself, so no other site can act with it.

``GET /tier/requests`` is answered here, from the end of the files of ``--tier-log-requests``. They
are read when it is asked: no scheduler takes part, and nothing is kept while nobody asks.
"""

from __future__ import annotations

import asyncio
import base64
import bisect
import contextlib
import functools
import hashlib
import os
import re
import time
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request, Response  # noqa: TC002 - FastAPI reads them out of annotations
from fastapi.responses import HTMLResponse
from sglang.srt.disaggregation.kv_events import uses_dynamo_format
from sglang.srt.runtime_context import describe_kv_events_publisher

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
from sglang_tiered.integration.admin import service
from sglang_tiered.integration.admin.costs import CostBoard, server_costs
from sglang_tiered.integration.admin.role_switch import is_draining, model_door
from sglang_tiered.policy.server_costs import ABANDONED, EventSource
from sglang_tiered.request_log import VERSION, RequestRecord, Sources, older
from sglang_tiered.tools.causes import cause

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping
    from pathlib import Path

    from fastapi import FastAPI

    from sglang_tiered.config import TieredConfig
    from sglang_tiered.integration.admin.service import Report
    from sglang_tiered.request_log import RequestLogConfig

    Application = Callable[[Any, Any, Any], Awaitable[None]]
    Answer = Callable[[Call, Request], Awaitable[Report]]
    Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


PAGE = "/tier/"

MINUTE_S = 60.0

MAX_PROMPTS = 4096
"""Of a list, each of which has a room of its own: the number of the list and its place."""

TAIL_BYTES = 1 << 20
"""What is read of all replicas' lines: about 1,700 of them, in some forty milliseconds."""

NOT_LOGGED = (
    "this server writes no line of its requests; start it with --tier-log-requests FILE to see them"
)

OTHER_SITE = "a page of another site had a browser send this; start the server with --api-key"

_look = asyncio.Lock()


def add_routes(app: FastAPI, board: CostBoard, config: TieredConfig, *, has_key: bool) -> None:
    """Add the endpoints and the page. Call it once, before the server listens. The schedulers write
    their costs to ``board``, which the caller keeps open."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    app.add_middleware(model_door)
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: _with_page(build())  # type: ignore[method-assign]
    guarded = auth_level(AuthLevel.ADMIN_OPTIONAL)
    others: dict[Any, Answer] = {
        CostsCall: functools.partial(_costs, board, config),
        RequestsCall: functools.partial(_newest, config),
    }
    for call in CALLS:
        answer = others.get(call, _ask_schedulers)
        endpoint = guarded(_endpoint(call, answer, has_key=has_key))
        app.add_api_route(call.path, endpoint, methods=[call.method], response_model=None)


def _manager() -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


async def _ask_schedulers(call: Call, _: Request) -> Report:
    return await service.answer(_manager(), call)


def _endpoint(call: type[Call], answer: Answer, *, has_key: bool) -> Endpoint:
    """Return the handler of one call, which ``answer`` answers."""

    async def endpoint(request: Request) -> Response:
        try:
            if not has_key and _is_of_another_site(request.headers):
                raise CallError(OTHER_SITE, 403)
            given = dict(request.query_params) if call.method == "GET" else await _json(request)
            status, body = await answer(decode(call, given), request)
        except CallError as error:
            status, body = error.status, {"error": str(error)}
        # Others say in their sentence when: an hour's allowance is not back in a second.
        headers = {"Retry-After": "1"} if call is CostsCall and status == 503 else None
        told = msgspec.json.encode(body)
        return Response(told, status, headers, media_type="application/json")

    return endpoint


async def _costs(board: CostBoard, config: TieredConfig, _: Call, request: Request) -> Report:
    """Answer ``/tier/costs``. Reads memory only. It hears there of requests that were given up,
    too."""
    manager = _manager()
    _abort_rooms(manager, request.headers.get(ABANDONED, ""))
    draining, events = is_draining(manager), _event_source(manager.server_args)
    try:
        return 200, server_costs(board, config, draining=draining, events=events)
    except CallError as error:
        part = {  # what a router must know of a server without costs
            "disaggregation_mode": manager.disaggregation_mode.value,
            "disaggregation_bootstrap_port": manager.server_args.disaggregation_bootstrap_port,
            "draining": draining,
        }
        return error.status, {"error": str(error), **part}


def _abort_rooms(manager: Any, told: str) -> None:
    """Abort requests on prefill that decode will never ask for, by their clients' numbers with
    commas between them. They would wait a minute, as a mirrored request has no client."""
    numbers = [int(word) for word in told.split(",") if re.fullmatch("[0-9]{1,19}", word)]
    numbers.sort()
    for rid, state in list(manager.rid_to_state.items()) if numbers else ():
        room = getattr(state.obj, "bootstrap_room", None)
        if room is None or not state.dispatched:  # a request is aborted once, and not known yet
            continue
        at = bisect.bisect_right(numbers, room) - 1
        if at >= 0 and room - numbers[at] < MAX_PROMPTS:
            manager.abort_request(rid)


def _event_source(settings: Any) -> EventSource | None:
    """Return where a server with these arguments (SGLang's) publishes KV events, None where it
    publishes none, or not over TCP."""
    told = describe_kv_events_publisher(settings)
    if told is None:
        return None
    return EventSource(
        told["endpoint_host"],
        told["endpoint_port_base"],
        told["topic"],
        told.get("replay_endpoint_port_base"),
        uses_dynamo_format(settings.kv_events_config),
    )


async def _newest(config: TieredConfig, call: Call, _: Request) -> Report:
    """Answer ``/tier/requests``. Reads files on a thread, and takes one look at a time: a disk that
    hangs may not take the threads that name look-ups and others want."""
    assert isinstance(call, RequestsCall)
    if _look.locked():
        raise CallError("the lines are being read for somebody else; ask again", 503)
    async with _look:
        return 200, await asyncio.to_thread(newest_requests, config.request_log, call.limit)


async def _json(request: Request) -> Any:
    """Return the parsed body. Raises ``CallError``."""
    try:
        return msgspec.json.decode(await request.body())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallError(f"the body is not JSON ({error}); pass a JSON object") from None


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


def _is_of_another_site(headers: Mapping[str, str]) -> bool:
    """Whether another site's page has a browser send this. Such a page may send a ``POST`` of text
    to any server that the browser reaches. SGLang lets it add headers and read every answer."""
    if site := headers.get("sec-fetch-site"):  # which browsers tell this machine and over TLS
        return site in ("cross-site", "same-site")
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")


def _with_page(app: Application) -> Application:
    """Return an application that answers ``GET`` and ``HEAD`` of ``PAGE`` in front of SGLang's and
    its keys, and opens nothing else. SGLang decides about keys by a path that it reads out of a
    URL. That may be another path than is served."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        is_page = path == PAGE and scope.get("method") in ("GET", "HEAD")
        await (_page() if is_page else app)(scope, receive, send)

    return answer


@functools.cache
def _page() -> Response:
    """Return the page, which is read when somebody first looks."""
    text = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_digest('script', text)}",
            f"style-src {_digest('style', text)}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return HTMLResponse(text, headers=headers)


def _digest(element: str, text: str) -> str:
    """Return the only content of an element that a browser may run, by its digest."""
    (content,) = re.findall(f"<{element}>(.*?)</{element}>", text, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
