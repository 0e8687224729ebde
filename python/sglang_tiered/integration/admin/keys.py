"""The key that opens ``GET /tier/costs`` alone: it is made of the operator's."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

from sglang_tiered.policy.server_costs import costs_key

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["around_auth"]


def around_auth(decide: Callable[..., Any], **told: Any) -> Any:
    """Wrap SGLang's ``decide_request_auth``: for the costs a key that is made of the operator's is
    as good as that."""
    operator = told["admin_api_key"] or told["api_key"]
    if operator and (told["method"], told["path"]) == ("GET", "/tier/costs"):
        given = (told["authorization_header"] or "").encode("utf-8", "surrogateescape")
        if hmac.compare_digest(given, f"Bearer {costs_key(operator)}".encode()):
            told["authorization_header"] = f"Bearer {operator}"
    return decide(**told)
