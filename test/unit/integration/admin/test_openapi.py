"""``docs/openapi.json`` says what the handlers take, and every path and method of theirs."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator

import write_openapi
from kit.openapi import check_answer, described, is_admitted
from sglang_tiered import api
from sglang_tiered.integration.admin.http_api import add_routes

TENANT = {"extra_key": "acme", "cache_salt": "s"}
SELECTORS: list[dict[str, Any]] = [
    {"rid": "r"},
    {"conversation_id": "c", **TENANT},
    {"text": "t"},
    {"input_ids": [0, 2**31 - 1]},
]
POSTED = [call for call in api.CALLS if "POST" in call.methods]
YEARS_S = 3650 * 86_400
# Values of each field, within and beyond what is taken.
VALUES: dict[str, list[Any]] = {
    "tier": ["nvme", "object", "host", "", None],
    "name": ["n", "n" * 512, "n" * 513, "", 1],
    "ttl": [1, 0.5, YEARS_S, YEARS_S + 1, 0, -1, "1", True],
    "wait_s": [0, 30, 1.5, 31, -1, "1", None],
    "keep_tokens": [0, 2**22, 2**22 + 1, -1, "1", True, 1.5],
    "all": [True, False, None],
    "extra_key": ["a", "", None, 1],
    "cache_salt": ["a", "", None],
    "rid": ["r", "", 1],
    "conversation_id": ["c", "c" * 512, "c" * 513],
    "text": ["t", "", 1],
    "input_ids": [[1], [], [-1], [2**31], ["1"], "1", [True]],
    "unheard": ["x"],
}
BODIES: list[Any] = [
    *(
        {**selector, name: value}
        for selector in ({}, *SELECTORS)
        for name in VALUES
        for value in VALUES[name]
    ),
    *SELECTORS,
    *({"name": "n", name: value} for name in VALUES for value in VALUES[name]),
    {},
    TENANT,
    {"all": True, **TENANT},
    [],
    "text",
    None,
]


def takes(call: type[api.Call], body: Any, *, is_query: bool = False) -> bool:
    try:
        api.decode(call, body, is_query=is_query)
    except api.CallError:
        return False
    return True


def test_the_file_is_what_the_script_writes() -> None:
    assert write_openapi.PAGE.read_text(encoding="utf-8") == write_openapi.text()


def test_every_route_and_method_is_described() -> None:
    app = FastAPI()
    before = set(map(id, app.routes))
    add_routes(app, None, None)  # type: ignore[arg-type] # nothing is asked of them
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


@pytest.mark.parametrize("call", [api.ConversationsCall, api.TenantsCall, api.RequestsCall])
def test_query_fields_are_described_as_taken(call: type[api.Call]) -> None:
    parameters = described()["paths"][call.path]["get"]["parameters"]
    schemas = {one["name"]: one["schema"] for one in parameters}
    for field in ("limit", "after", *TENANT, "rid", "unheard"):
        value: Any = 1000 if field == "limit" else "x"
        assert takes(call, {field: str(value)}, is_query=True) == (field in schemas), field
        assert field not in schemas or Draft202012Validator(schemas[field]).is_valid(value)
    assert not takes(call, {"limit": str(schemas["limit"]["maximum"] + 1)}, is_query=True)


def test_answers_with_undescribed_fields_are_caught() -> None:
    check_answer("POST", "/tier/unpin", 200, {"unpinned": True})
    for status, answer in ((200, {"unpinned": True, "x": 1}), (200, {}), (409, {"error": "x"})):
        with pytest.raises(Exception, match=r"x|required|answered"):
            check_answer("POST", "/tier/unpin", status, answer)
