"""Keys that open one call alone, made of the operator's: of ``GET /tier/costs``, and of one order
by ``POST /pd_role_switch``, which each process of a server takes once."""

from __future__ import annotations

import hmac
import time
from typing import TYPE_CHECKING, Any

from sglang_tiered.policy.server_costs import (
    COSTS_CALL,
    SWITCH_CALL,
    costs_key,
    order_of,
    switch_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class _Orders:
    """``taken``: keys that were used."""

    boot = ""

    def __init__(self) -> None:
        self.taken: set[str] = set()


_orders = _Orders()
_BEARER = "Bearer "


def take_orders(boot: str) -> None:
    """Have this process take keys for orders to this start of its server."""
    _orders.boot = boot


def around_auth(decide: Callable[..., Any], **told: Any) -> Any:
    """Wrap SGLang's ``decide_request_auth``: for its call a key that is made of the operator's is
    as good as that. It does not see the role that is asked for: ``around_switch`` does."""
    from sglang.srt.runtime_context import get_serving

    operator = told["admin_api_key"] or told["api_key"]
    given = told["authorization_header"] or ""
    path = told["path"].removeprefix(get_serving().fastapi_root_path or "")
    call, wanted = f"{told['method']} {path}", ""
    if operator and call == COSTS_CALL:
        wanted = costs_key(operator)
    elif operator and call == SWITCH_CALL and (order := order_of(given.removeprefix(_BEARER))):
        role, until_s = order
        if time.time() < until_s and _orders.boot and given not in _orders.taken:
            wanted = switch_key(operator, _orders.boot, role, until_s)
    if wanted and hmac.compare_digest(
        given.encode("utf-8", "surrogateescape"), f"{_BEARER}{wanted}".encode()
    ):
        told["authorization_header"] = f"{_BEARER}{operator}"
        if call == SWITCH_CALL:
            _orders.taken.add(given)
    return decide(**told)


def ordered_role(headers: Mapping[str, str]) -> str:
    """Return the role that the key of a request to switch is for; nothing for an operator's."""
    order = order_of(headers.get("authorization", "").removeprefix(_BEARER))
    return order[0] if order else ""
