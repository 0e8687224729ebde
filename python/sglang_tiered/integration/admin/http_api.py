"""The endpoints of the tiers in SGLang's HTTP server. Their API keys are those of
``/flush_cache``.

``POST /tier/purge``   ``{"extra_key": ..., "cache_salt": ...}`` (either may be left out), or
                       ``{"all": true}``. Answers 200 once none of its pages is a hit, now and after
                       a crash, or 503 with what is missing (ask again).
``GET /tier/tenants``  ``?limit=N``: the tenants with the most bytes on NVMe, a list per scheduler.
``POST /tier/checkpoint``  ``{"rid": ...}``, ``{"text": ...}`` or ``{"input_ids": [...]}``, with
                       ``extra_key``, ``cache_salt`` and ``tier`` (``nvme``, or ``object`` where
                       there is one, which is then the default). Answers 200 once all whole pages
                       of that prefix are durable there, or 503 with the number of tokens that are
                       not. For ``nvme``, pages that only the bucket holds are copied to NVMe.
``GET, POST /tier/residency``  the same without ``tier``, as query or body: leading tokens by tier.
``POST /tier/pin``     a prefix as for ``residency``, with ``name`` (by default its last page's
                       hash) and ``ttl`` in seconds (none: until it is unpinned): NVMe keeps it,
                       whatever else is stored. Answers as ``checkpoint`` does once it is durable
                       there, or 409 if all pins together would take more than their share. A pin
                       of the same name is replaced.
``POST /tier/unpin``   ``{"name": ...}`` with the tenant's ``extra_key`` and ``cache_salt``, or a
                       prefix as for ``residency``. 404 if there is no such pin.
``GET /tier/pins``     ``?extra_key=...&cache_salt=...``: the pins of one tenant, by scheduler.
``GET /tier/costs``    what computing and loading cost here, and how busy the server is
                       (``policy.server_costs.ServerCosts``), from what the schedulers wrote last:
                       no scheduler is asked. 404 where none learns costs, 503 before the first did.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_tiered.integration.admin.costs import why_no_costs
from sglang_tiered.policy.server_costs import ServerCosts

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from fastapi import FastAPI, Request, Response

    from sglang_tiered.config import TieredConfig
    from sglang_tiered.integration.admin.cost_board import CostBoard

__all__ = [
    "PurgeRequestError",
    "SelectorError",
    "add_routes",
    "parse_pin",
    "parse_purge",
    "parse_selector",
    "parse_unpin",
]

TIMEOUT_S = 30.0
_POLL_S, _MAX_POLL_S = 0.02, 0.25
_MAX_LIMIT = 1000
_MAX_TOKENS = 1 << 22
_MAX_CHARACTERS = 4 * _MAX_TOKENS  # of a text, before it is tokenized
_MAX_SHOWN = 40
_MAX_NAME_BYTES = 512
_MAX_TTL_S = 10 * 365 * 86_400
NOT_PUBLISHED = (
    "no scheduler of this server has said what its loads cost: it is starting, or its model runs "
    "without the tiers, as its log says; ask again"
)
_SOURCES = ("rid", "text", "input_ids")
_TIERS = ("nvme", "object")


class PurgeRequestError(ValueError):
    """Raised for a purge whose body names nothing or too much. Its text is one sentence."""


class SelectorError(ValueError):
    """Raised for a body that does not name one prefix. Its text is one sentence."""


def parse_selector(body: Any, *, with_tier: bool) -> dict[str, Any]:
    """Return the fields that select one prefix. Raises ``SelectorError``."""
    if not isinstance(body, dict):
        raise SelectorError("the body must be a JSON object")
    known = {*_SOURCES, "extra_key", "cache_salt", *(("tier",) if with_tier else ())}
    unknown = sorted(body.keys() - known)
    if unknown:
        shown = repr(unknown[0][:_MAX_SHOWN])
        raise SelectorError(f"{shown} is unknown; pass {', '.join(sorted(known))}")
    sources = [name for name in _SOURCES if name in body]
    if len(sources) != 1:
        raise SelectorError(f"pass exactly one of {', '.join(_SOURCES)}")
    if "rid" in body and ("extra_key" in body or "cache_salt" in body):
        raise SelectorError("a rid names its extra_key and cache_salt itself; leave them out")
    for name, value in body.items():
        if name == "input_ids":
            if not _are_tokens(value):
                raise SelectorError("input_ids must be a list of token numbers that is not empty")
            _check_length(len(value), "input_ids", "tokens", _MAX_TOKENS)
        elif (problem := _problem(name, value)) is not None:
            raise SelectorError(problem)
    _check_length(len(body.get("text", "")), "text", "characters", _MAX_CHARACTERS)
    if body.get("tier", "nvme") not in _TIERS:
        shown = repr(body["tier"][:_MAX_SHOWN])
        raise SelectorError(f"tier {shown} is unknown; choose one of {', '.join(_TIERS)}")
    return dict(body)


def parse_pin(body: Any) -> dict[str, Any]:
    """Return what to pin. Raises ``SelectorError``."""
    if not isinstance(body, dict):
        raise SelectorError("the body must be a JSON object")
    own = {name: body[name] for name in ("name", "ttl") if name in body}
    rest = {name: value for name, value in body.items() if name not in own}
    selector = parse_selector(rest, with_tier=False)
    _check_name(own)
    ttl = own.get("ttl", 1)
    if type(ttl) not in (int, float) or not 0 < ttl <= _MAX_TTL_S:
        raise SelectorError(f"ttl {ttl!r:.40} must be seconds, more than 0, at most {_MAX_TTL_S}")
    return {**selector, **own}


def parse_unpin(body: Any) -> dict[str, Any]:
    """Return what to unpin: a name and its tenant, or a prefix. Raises ``SelectorError``."""
    if not isinstance(body, dict) or "name" not in body:
        return parse_selector(body, with_tier=False)
    _check_name(body)
    return {"name": body["name"], **_parse_tenant(body, "name")}


def _parse_tenant(body: dict[str, Any], *besides: str) -> dict[str, Any]:
    """Return the keys of a tenant. Raises ``SelectorError``."""
    tenant = {name: value for name, value in body.items() if name not in besides}
    unknown = sorted(tenant.keys() - {"extra_key", "cache_salt"})
    if unknown:
        shown = repr(unknown[0][:_MAX_SHOWN])
        raise SelectorError(f"{shown} is unknown here; pass extra_key and cache_salt")
    for name, value in tenant.items():
        if (problem := _problem(name, value)) is not None:
            raise SelectorError(problem)
    return tenant


def _check_name(body: dict[str, Any]) -> None:
    if "name" not in body:
        return
    if (problem := _problem("name", body["name"])) is not None:
        raise SelectorError(problem)
    if (length := len(body["name"].encode())) > _MAX_NAME_BYTES:
        raise SelectorError(f"name has {length} bytes, more than {_MAX_NAME_BYTES}; shorten it")


def _check_length(length: int, name: str, unit: str, limit: int) -> None:
    if length > limit:
        raise SelectorError(
            f"{name} has {length} {unit}, more than {limit}; pass the beginning of it"
        )


def _problem(name: str, value: Any) -> str | None:
    """Return what is wrong with a value that must be a text, or None."""
    if not isinstance(value, str) or not value:
        return f"{name} must be a text that is not empty"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])
        return (
            f"{name} has {half} at character {error.start}, half of a surrogate pair, which no "
            "text in UTF-8 holds; pass the whole character"
        )
    return None


def _are_tokens(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(type(token) is int and 0 <= token < 1 << 31 for token in value)


def parse_purge(body: Any) -> dict[str, Any]:
    """Return what to purge. Raises ``PurgeRequestError``, also for an empty body: it must not purge
    everything."""
    if not isinstance(body, dict):
        raise PurgeRequestError("the body must be a JSON object")
    unknown = sorted(body.keys() - {"extra_key", "cache_salt", "all"})
    if unknown:
        shown = repr(unknown[0][:_MAX_SHOWN])
        raise PurgeRequestError(f"{shown} is unknown; pass extra_key, cache_salt or all")
    if "all" in body:
        if body != {"all": True}:
            raise PurgeRequestError('"all" must be true, and stand alone')
        return {"all": True}
    for name, value in body.items():
        if (problem := _problem(name, value)) is not None:
            raise PurgeRequestError(problem)
    if not body:
        raise PurgeRequestError('pass extra_key, cache_salt or both, or "all": true')
    return dict(body)


def add_routes(app: FastAPI, board: CostBoard, config: TieredConfig) -> None:
    """Add the endpoints. Call it once, before the server listens. The schedulers write their costs
    to ``board``, which the caller keeps open."""
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def purge(request: Request) -> Response:
        try:
            body = parse_purge(await _json(request))
        except ValueError as error:
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
    costs = guarded(_costs_endpoint(board, config))
    app.add_api_route("/tier/costs", costs, methods=["GET"], response_model=None)
    app.add_api_route("/tier/tenants", guarded(tenants), methods=["GET"], response_model=None)
    _add_conversation_routes(app)
    _add_pin_routes(app)


def _add_conversation_routes(app: FastAPI) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def checkpoint(request: Request) -> Response:
        try:
            body = await _with_tokens(parse_selector(await _json(request), with_tier=True))
        except ValueError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        answers = await _ask("checkpoint", body, repeats_body=False)
        return _answer(answers, lambda answer: 200 if _is_durable(answer) else 503)

    async def residency(request: Request) -> Response:
        try:
            body = _query(request) if request.method == "GET" else await _json(request)
            body = await _with_tokens(parse_selector(body, with_tier=False))
        except ValueError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        return _answer(await _ask("residency", body), lambda _: 200)

    guarded = auth_level(AuthLevel.ADMIN_OPTIONAL)
    checkpoint.__annotations__ = residency.__annotations__ = {"request": Request}
    app.add_api_route(
        "/tier/checkpoint", guarded(checkpoint), methods=["POST"], response_model=None
    )
    app.add_api_route(
        "/tier/residency", guarded(residency), methods=["GET", "POST"], response_model=None
    )


def _add_pin_routes(app: FastAPI) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def pin(request: Request) -> Response:
        try:
            body = await _with_tokens(parse_pin(await _json(request)))
        except ValueError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        answers = await _ask("pin", {**body, "now": time.time()}, repeats_body=False)
        beyond = [answer["error"] for answer in answers if answer.get("is_beyond")]
        if beyond:
            return JSONResponse({"error": beyond[0]}, status_code=409)
        return _answer(answers, lambda answer: 200 if _is_durable(answer) else 503)

    async def unpin(request: Request) -> Response:
        try:
            body = await _with_tokens(parse_unpin(await _json(request)))
        except ValueError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        answers = await _ask("unpin", body)
        known = [answer for answer in answers if "unknown" not in answer]
        failed = [answer["error"] for answer in known if "error" in answer]
        if failed:
            return JSONResponse({"error": failed[0]}, status_code=400)
        if not known:
            return JSONResponse({"error": "there is no such pin"}, status_code=404)
        done = all(answer["done"] for answer in known)
        return JSONResponse({"unpinned": done}, status_code=200 if done else 503)

    async def list_pins(request: Request) -> Response:
        try:
            tenant = _parse_tenant(dict(request.query_params))
        except ValueError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        answers = await _ask("pins", tenant)
        failed = [answer["error"] for answer in answers if "error" in answer]
        if failed:
            return JSONResponse({"error": failed[0]}, status_code=400)
        if not all(answer["done"] for answer in answers):
            return JSONResponse({"error": "pins are still counted; ask again"}, status_code=503)
        return JSONResponse(
            [{key: value for key, value in answer.items() if key != "done"} for answer in answers]
        )

    guarded = auth_level(AuthLevel.ADMIN_OPTIONAL)
    pin.__annotations__ = unpin.__annotations__ = {"request": Request}
    list_pins.__annotations__ = {"request": Request}
    app.add_api_route("/tier/pin", guarded(pin), methods=["POST"], response_model=None)
    app.add_api_route("/tier/unpin", guarded(unpin), methods=["POST"], response_model=None)
    app.add_api_route("/tier/pins", guarded(list_pins), methods=["GET"], response_model=None)


def _answer(answers: list[dict[str, Any]], status: Callable[[Any], int]) -> Response:
    from fastapi.responses import JSONResponse

    known = [answer for answer in answers if "unknown" not in answer]
    failed = [answer["error"] for answer in known if "error" in answer]
    if failed:
        return JSONResponse({"error": failed[0]}, status_code=400)
    if not known:
        sentence = "no request with this rid ended recently; pass its text or input_ids"
        return JSONResponse({"error": sentence}, status_code=404)
    # With data parallelism a conversation lives in one scheduler: report the best answer.
    best = max(known, key=lambda answer: sum(v for v in answer.values() if type(v) is int))
    if any(_is_durable(answer) for answer in known):
        best = next(answer for answer in known if _is_durable(answer))
    report = {name: value for name, value in best.items() if name != "done"}
    return JSONResponse(report, status_code=status(best))


def _costs_endpoint(
    board: CostBoard, config: TieredConfig
) -> Callable[[], Coroutine[Any, Any, Response]]:
    """Return the handler of ``/tier/costs``, which reads memory only."""
    from fastapi import Response
    from fastapi.responses import JSONResponse

    problem = why_no_costs(config)

    async def costs():  # type: ignore[no-untyped-def] # FastAPI would resolve an annotation
        from sglang.srt.entrypoints.http_server import get_global_state

        if problem is not None:
            return JSONResponse({"error": problem}, 404)
        ranks = board.read()
        if not ranks:
            return JSONResponse({"error": NOT_PUBLISHED}, 503, {"Retry-After": "1"})
        draining = bool(get_global_state().tokenizer_manager.gracefully_exit)
        answer = ServerCosts(draining=draining, num_ranks=board.num_ranks, ranks=ranks)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return costs


async def _json(request: Request) -> Any:
    """Return the parsed body. Raises ``ValueError`` with one sentence."""
    try:
        return await request.json()
    except RecursionError:
        raise ValueError(
            "the body is nested too deeply; pass a JSON object of texts and token numbers"
        ) from None
    except ValueError as error:
        raise ValueError(f"the body is not JSON ({error}); pass a JSON object") from None


def _is_durable(answer: dict[str, Any]) -> bool:
    return bool(answer.get("done")) and answer.get("num_missing") == 0


def _query(request: Request) -> dict[str, Any]:
    """Return query parameters as a body; ``input_ids`` are separated by commas."""
    body: dict[str, Any] = dict(request.query_params)
    if "input_ids" in body:
        words = body["input_ids"].split(",")
        body["input_ids"] = [int(word) if word.strip().isdecimal() else -1 for word in words]
    return body


async def _with_tokens(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with ``input_ids`` in place of ``text``. Raises ``SelectorError``."""
    text = body.pop("text", None)
    if text is None:
        return body
    from sglang.srt.entrypoints.http_server import get_global_state

    tokenizer = get_global_state().tokenizer_manager.tokenizer
    if tokenizer is None:
        raise SelectorError("this server has no tokenizer; pass input_ids")
    # A long text takes a second, for which it must not block the streams of other requests.
    tokens = await asyncio.to_thread(tokenizer.encode, text)
    _check_length(len(tokens), "text", "tokens", _MAX_TOKENS)
    return {**body, "input_ids": [int(token) for token in tokens]}


async def _ask(
    method: str, body: dict[str, Any], *, repeats_body: bool = True
) -> list[dict[str, Any]]:
    """Poll until all schedulers are done or the time is up; return one answer of each."""
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.io_struct import DumperControlReqInput

    from sglang_tiered.integration.admin.control import PREFIX

    number = uuid.uuid4().hex
    message = {**body, "id": number}
    deadline = time.monotonic() + TIMEOUT_S
    pause_s = _POLL_S
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
        if not repeats_body:  # the prompt may be long
            message = {"id": number}
        await asyncio.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _MAX_POLL_S)
