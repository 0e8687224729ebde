"""Addresses of servers: as a user writes them, as ZeroMQ takes them, and where requests are
answered, as routers are told through a Redis (``membership``)."""

from __future__ import annotations

import enum
import ipaddress
import re
import socket
from typing import NamedTuple

from sglang_tiered.errors import ConfigError

__all__ = ["Role", "Serving", "Target", "is_serving", "parse_targets", "resolve"]

_TARGET = re.compile(r"(?:dns://)?(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})")


_URL = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")


class Target(NamedTuple):
    """A name or address of servers, and the port of their first rank."""

    host: str
    port: int


def parse_targets(text: str) -> tuple[Target, ...]:
    """Read ``HOST:PORT,...`` or ``dns://name:port``. Raises ``ConfigError``, one sentence."""
    targets = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        match = _TARGET.fullmatch(part)
        if match is None or not 0 < int(match[3]) < 1 << 16:
            raise ConfigError(
                f"--tier-peers {part!r} is no address; write HOST:PORT, several separated by "
                "commas, or dns://NAME:PORT for all addresses of a name."
            )
        targets.append(Target(match[1] or match[2], int(match[3])))
    if not targets:
        raise ConfigError("--tier-peers names no server; write HOST:PORT,... or drop it.")
    return tuple(dict.fromkeys(targets))


def resolve(host: str) -> list[str]:
    """All IP addresses of a host. Raises ``OSError``; may take long."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = (str(address[0]).partition("%")[0] for *_, address in found)
    return [str(ipaddress.ip_address(each)) for each in dict.fromkeys(addresses)]


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
