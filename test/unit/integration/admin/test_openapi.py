"""``docs/openapi.json`` says what the handlers take, and every path and method of theirs."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator

import write_openapi
from kit.openapi import check_answer, described, is_admitted
from sglang_tiered.integration.admin import bodies
from sglang_tiered.integration.admin.http_api import add_routes

TENANT = {"extra_key": "acme", "cache_salt": "s"}
SELECTORS: list[dict[str, Any]] = [
    {"rid": "r"},
    {"conversation_id": "c", **TENANT},
    {"text": "t"},
    {"input_ids": [0, 2**31 - 1]},
]
PARSERS: dict[str, Any] = {
    "checkpoint": lambda body: bodies.parse_selector(body, with_tier=True),
    "residency": lambda body: bodies.parse_selector(body, with_tier=False),
    "pin": bodies.parse_pin,
    "unpin": bodies.parse_unpin,
    "prefetch": bodies.parse_prefetch,
    "forget": bodies.parse_forget,
    "purge": bodies.parse_purge,
}
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


def takes(name: str, body: Any) -> bool:
    try:
        PARSERS[name](body)
    except bodies.CallError:
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


@pytest.mark.parametrize("name", PARSERS)
def test_bodies_are_described_as_they_are_taken(name: str) -> None:
    told = [body for body in BODIES if is_admitted(f"/tier/{name}", body) != takes(name, body)]
    assert not told
    assert any(takes(name, body) for body in BODIES)


@pytest.mark.parametrize(
    ("path", "parse"),
    [("conversations", bodies.parse_listing), ("tenants", bodies.parse_limit)],
)
def test_query_fields_are_described_as_taken(path: str, parse: Any) -> None:
    parameters = described()["paths"][f"/tier/{path}"]["get"]["parameters"]
    schemas = {one["name"]: one["schema"] for one in parameters}
    for field in ("limit", "after", *TENANT, "rid", "unheard"):
        value = {"limit": 1000, "after": bodies.cursor_of({"0": "r1"})}.get(field, "x")
        try:
            parse({field: value})
            taken = True
        except bodies.CallError:
            taken = False
        assert taken == (field in schemas), field
        assert not taken or Draft202012Validator(schemas[field]).is_valid(value)
    with pytest.raises(bodies.CallError):
        parse({"limit": schemas["limit"]["maximum"] + 1})


def test_answers_with_undescribed_fields_are_caught() -> None:
    check_answer("POST", "/tier/unpin", 200, {"unpinned": True})
    for status, answer in ((200, {"unpinned": True, "x": 1}), (200, {}), (409, {"error": "x"})):
        with pytest.raises(Exception, match=r"x|required|answered"):
            check_answer("POST", "/tier/unpin", status, answer)
