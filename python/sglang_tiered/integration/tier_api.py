"""Our endpoints in SGLang's HTTP server, under the rules of its ``/flush_cache`` for keys.

``POST /tier/purge``   ``{"extra_key": ..., "cache_salt": ...}`` (either may be left out), or
                       ``{"all": true}``. Answers once nothing of it is a hit, now and after a crash
                       (200), or says what is missing (503: ask again).
``GET /tier/tenants``  ``?limit=N``: the tenants with most on NVMe, one list per scheduler.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

__all__ = ["PurgeRequestError", "add_routes", "parse_purge"]

TIMEOUT_S = 30.0
_POLL_S = 0.02
_MAX_LIMIT = 1000


class PurgeRequestError(ValueError):
    """A body that names nothing, or too much; one sentence."""


def parse_purge(body: Any) -> dict[str, Any]:
    """What is to be purged. An empty body is refused: it must not purge everything."""
    if not isinstance(body, dict):
        raise PurgeRequestError("the body must be a JSON object")
    unknown = sorted(body.keys() - {"extra_key", "cache_salt", "all"})
    if unknown:
        raise PurgeRequestError(f"{unknown[0]!r} is unknown; pass extra_key, cache_salt or all")
    if "all" in body:
        if body != {"all": True}:
            raise PurgeRequestError('"all" must be true, and stand alone')
        return {"all": True}
    for name, value in body.items():
        if not isinstance(value, str) or not value:
            raise PurgeRequestError(f"{name} must be a text that is not empty")
    if not body:
        raise PurgeRequestError('pass extra_key, cache_salt or both, or "all": true')
    return dict(body)


def add_routes(app: FastAPI) -> None:
    """Once, before the server listens."""
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def purge(request: Request) -> Response:
        try:
            body = parse_purge(await request.json())
        except ValueError as error:  # of JSON too
            return JSONResponse({"error": str(error)}, status_code=400)
        answers = await _ask("purge", body)
        failed = [answer["error"] for answer in answers if "error" in answer]
        if failed:
            return JSONResponse({"error": failed[0]}, status_code=400)
        durable = all(answer["durable"] for answer in answers)
        hidden = any(answer["in_memory"] == "hidden" for answer in answers)
        report = {"durable": durable, "in_memory": "hidden" if hidden else "gone"}
        return JSONResponse(report, status_code=200 if durable else 503)

    async def tenants(limit: int = 100) -> Response:
        answers = await _ask("tenants", {"limit": max(1, min(limit, _MAX_LIMIT))})
        return JSONResponse([answer.get("tenants", []) for answer in answers])

    guarded = auth_level(AuthLevel.ADMIN_OPTIONAL)
    # FastAPI resolves annotations as text against this module, which does not import it.
    purge.__annotations__ = {"request": Request}
    tenants.__annotations__ = {"limit": int}
    app.add_api_route("/tier/purge", guarded(purge), methods=["POST"], response_model=None)
    app.add_api_route("/tier/tenants", guarded(tenants), methods=["GET"], response_model=None)


async def _ask(method: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """One answer per scheduler that SGLang hears, when all are done or the time is up."""
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.io_struct import DumperControlReqInput

    from sglang_tiered.integration.purging import PREFIX

    message = {**body, "id": uuid.uuid4().hex}
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        manager = get_global_state().tokenizer_manager
        replies = await manager.dumper_control(
            DumperControlReqInput(method=PREFIX + method, body=message)
        )
        answers = [
            answer
            for reply in replies
            for answer in (reply.response if reply.success else [{"error": reply.error}])
        ]
        done = all(answer.get("done", True) for answer in answers)
        if done or time.monotonic() >= deadline:
            return answers
        await asyncio.sleep(_POLL_S)
