"""A key of one call opens that call alone, whichever key the operator's is; and of a switch of
roles, one order to one start of one server."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import runtime_context
from sglang.srt.utils.auth import AuthLevel, decide_request_auth

from sglang_tiered.integration.admin import role_switch
from sglang_tiered.integration.admin.role_switch import around_auth, ordered_role
from sglang_tiered.policy.server_costs import COSTS_CALL, SWITCH_CALL, costs_key, switch_key

CALLS = (COSTS_CALL, SWITCH_CALL, "GET /tier/tenants", "POST /flush_cache")
OTHER_BOOT = "00" * 16


@pytest.fixture(autouse=True)
def serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang tells of the server to its process of HTTP."""
    serving = SimpleNamespace(fastapi_root_path="")
    monkeypatch.setattr(runtime_context, "get_serving", lambda: serving)


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a server that this process is."""
    monkeypatch.setattr(role_switch, "_boot", "17" * 16)
    return "17" * 16


def opened(key: str, admin: str | None = None, api: str | None = "own") -> list[str]:
    """The calls that a key opens, which was not used before."""
    allowed = []
    role_switch._orders.clear()
    for call in CALLS:
        if is_allowed(call, key, admin, api):
            allowed.append(call)
        assert not is_allowed(call, None, admin, api)
    return allowed


def is_allowed(
    call: str, key: str | None, admin: str | None = None, api: str | None = "own"
) -> bool:
    method, path = call.split()
    told: dict[str, Any] = {"method": method, "path": path, "api_key": api, "admin_api_key": admin}
    told |= {"authorization_header": key and f"Bearer {key}"}
    return around_auth(decide_request_auth, **told, auth_level=AuthLevel.ADMIN_OPTIONAL).allowed


@pytest.mark.parametrize("operators", [("own", None), ("own", "other"), (None, "own")])
def test_a_key_of_one_call_opens_it_alone(
    operators: tuple[str | None, str | None], boot: str
) -> None:
    until_s = int(time.time()) + 60
    assert opened("own", *operators) == [*CALLS]
    for key, calls in (("own", 1), ("other", 0)):
        assert opened(costs_key(key), *operators) == [COSTS_CALL] * calls
        order = switch_key(key, boot, "decode", until_s)
        assert opened(order, *operators) == [SWITCH_CALL] * calls


def test_order_is_of_one_start_role_and_time(boot: str) -> None:
    """Whoever it was sent to may pass it on."""
    until_s = int(time.time()) + 60
    order = switch_key("own", boot, "decode", until_s)
    assert ordered_role({"authorization": f"Bearer {order}"}) == "decode"
    assert opened(order) == [SWITCH_CALL]
    for other in (
        switch_key("own", OTHER_BOOT, "decode", until_s),
        switch_key("own", boot, "decode", until_s - 61),
        order.replace("decode", "prefill"),
        order.replace(str(until_s), str(until_s + 1)),
        order[:-1],
    ):
        assert not opened(other)
    for given in ("Bearer own", "", "decode", f"Bearer {order}x"):
        assert ordered_role({"authorization": given}) == ""


def test_an_order_is_taken_once(boot: str) -> None:
    order = switch_key("own", boot, "decode", int(time.time()) + 60)
    taken = [is_allowed(SWITCH_CALL, key) for key in (order, order, "own", "own")]
    assert taken == [True, False, True, True], "the operator's own key opens it again and again"


def test_a_server_without_costs_takes_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_switch, "_boot", "")
    assert not opened(switch_key("own", "", "decode", int(time.time()) + 60))
