"""The service takes every call that a client makes, as it makes it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from sglang_tiered.client.calls import Request, SyncCalls
from sglang_tiered.integration.admin import bodies
from sglang_tiered.integration.admin.service import TierService

TENANT = {"extra_key": "acme", "cache_salt": "s"}
SELECTORS: list[dict[str, Any]] = [
    {"rid": "r"},
    {"conversation_id": "c", **TENANT},
    {"text": "t", "extra_key": "acme", "cache_salt": None},
    {"input_ids": [1, 2]},
]
OPTIONS: dict[str, dict[str, Any]] = {
    "checkpoint": {"tier": "object"},
    "residency": {},
    "pin": {"name": "n", "ttl": 1.5, "tier": "nvme"},
    "unpin": {},
    "prefetch": {"wait_s": 30},
    "forget": {"keep_tokens": 64},
}


class Recorder(SyncCalls):
    """Keeps the request in the place of an answer."""

    def send(self, request: Request[Any]) -> Any:
        return request


def taken(name: str, body: dict[str, Any]) -> Any:
    """What ``bodies`` makes of a body."""
    match name:
        case "checkpoint" | "residency":
            return bodies.parse_selector(body, with_tier=name == "checkpoint")
        case "conversations":
            return bodies.parse_listing(body)
        case "tenants":
            return bodies.parse_limit(body)
        case _:
            return getattr(bodies, f"parse_{name}")(body)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("selector", SELECTORS)
def test_service_takes_calls_on_prefixes(name: str, selector: dict[str, Any]) -> None:
    for options in ({}, OPTIONS[name]):
        request = getattr(Recorder(), name)(**selector, **options)
        assert request.path == f"/tier/{name}"
        assert inspect.iscoroutinefunction(getattr(TierService, name))
        assert taken(name, request.given())


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("unpin", {"name": "n", **TENANT}),
        ("conversation_page", {"limit": 5, **TENANT}),
        ("conversation_page", {}),
        ("purge", {"cache_salt": "s"}),
        ("purge_all", {}),
        ("tenants", {"limit": 3}),
        ("tenants", {}),
    ],
)
def test_service_takes_calls_on_tenants(call: str, arguments: dict[str, Any]) -> None:
    request = getattr(Recorder(), call)(**arguments)
    name = request.path.rpartition("/")[2]
    assert inspect.iscoroutinefunction(getattr(TierService, name))
    assert taken(name, request.given())
