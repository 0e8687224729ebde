"""Addresses of servers: as a user writes them, and as ZeroMQ takes them."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import NamedTuple

from sglang_tiered.errors import ConfigError

__all__ = ["Target", "parse_targets", "resolve"]

_TARGET = re.compile(r"(?:dns://)?(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})")


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
