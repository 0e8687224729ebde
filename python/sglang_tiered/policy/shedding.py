"""Which requests are refused at overload: those whose first token is predicted to come too late.

A prediction may be wrong, so a request is refused only while every server has work, which costs
little (``docs/routing.md``). Pure: seconds in, decisions out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["RequestClass", "retry_after_s"]

MAX_RETRY_S = 60


@dataclass(frozen=True, slots=True)
class RequestClass:
    """``limit_s``: within which the first token is due, None without a limit. ``priority`` goes to
    SGLang, None to leave it. ``is_sheddable``: whether requests may be refused."""

    name: str
    limit_s: float | None = None
    priority: int | None = None
    is_sheddable: bool = True


def retry_after_s(limit_s: float | None, predicted_s: float, least_queue_s: float) -> int | None:
    """Return in how many seconds to come again, by when the shortest queue will have shrunk enough;
    None to admit. ``predicted_s`` is the least time to the first token of all servers."""
    if limit_s is None or predicted_s <= limit_s or least_queue_s <= 0:
        return None
    late_s = min(predicted_s - limit_s, least_queue_s, MAX_RETRY_S)
    return max(1, math.ceil(late_s))
