"""Where a server answers requests, as it tells routers through a Redis (``membership``)."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

__all__ = ["Role", "Serving", "is_serving"]

_URL = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")


class Role(enum.IntEnum):
    """What a server does of a request."""

    AGGREGATED = 0  # all of it
    PREFILL = 1
    DECODE = 2


class Serving(NamedTuple):
    """Where a server answers requests."""

    url: str  # http://host:port or https://host:port
    role: Role
    rank: int  # the data-parallel replica that the pages are of
    bootstrap_port: int = 0  # where decode finds a prefill server; 0 for other roles


def is_serving(serving: Serving) -> bool:
    """Whether others would accept it."""
    match = _URL.fullmatch(serving.url)
    return (
        match is not None
        and len(serving.url) <= 255
        and 0 < int(match[2]) < 1 << 16
        and 0 <= serving.rank < 1 << 32
        and 0 <= serving.bootstrap_port < 1 << 16
    )
