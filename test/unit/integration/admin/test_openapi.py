"""``docs/openapi.json`` says what the handlers take, and every path and method of theirs."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from kit.openapi import described, is_admitted
from sglang_tiered import api
from sglang_tiered.integration.admin.http_api import add_routes

TENANT = {"extra_key": "acme", "cache_salt": "s"}
SELECTORS: list[dict[str, Any]] = [
    {"rid": "r"},
    {"conversation_id": "c", **TENANT},
    {"text": "t"},
    {"input_ids": [0, 2**31 - 1]},
]
POSTED = [call for call in api.CALLS if call.method == "POST"]
YEARS_S = 3650 * 86_400
# Values of each field, within and beyond what is taken.
VALUES: dict[str, list[Any]] = {
    "tier": ["nvme", "object", "host", "", None],
    "name": ["n", "n" * 512, "n" * 513, "", 1],
    "ttl": [0.5, YEARS_S, YEARS_S + 1, 0, "1", True],
    "wait_s": [0, 30, 31, -1, "1", None],
    "keep_tokens": [0, 2**22, 2**22 + 1, -1, "1", True, 1.5],
    "all": [True, False, None],
    **dict.fromkeys(("extra_key", "cache_salt", "rid", "text"), ["a", "", None, 1]),
    "conversation_id": ["c", "c" * 512, "c" * 513],
    "input_ids": [[1], [], [-1], [2**31], ["1"], "1", [True]],
    "unheard": ["x"],
}
BODIES: list[Any] = [
    {**selector, name: value}
    for selector in ({}, {"name": "n"}, *SELECTORS)
    for name in VALUES
    for value in VALUES[name]
]
BODIES += [*SELECTORS, {}, TENANT, {"all": True, **TENANT}, [], "text", None]


def takes(call: type[api.Call], body: Any) -> bool:
    try:
        api.decode(call, body)
    except api.CallError:
        return False
    return True


def test_every_route_and_method_is_described() -> None:
    app = FastAPI()
    before = set(map(id, app.routes))
    add_routes(app, None, None, has_key=True)  # type: ignore[arg-type] # nothing is asked
    routes = [r for r in app.routes if isinstance(r, APIRoute) and id(r) not in before]
    served = {(route.path, method.lower()) for route in routes for method in route.methods}
    assert served == {
        (path, method) for path, methods in described()["paths"].items() for method in methods
    }


@pytest.mark.parametrize("call", POSTED)
def test_bodies_are_described_as_they_are_taken(call: type[api.Call]) -> None:
    told = [body for body in BODIES if is_admitted(call.path, body) != takes(call, body)]
    assert not told
    assert any(takes(call, body) for body in BODIES)
