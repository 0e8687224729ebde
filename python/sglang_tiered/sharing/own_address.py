"""The address at which other servers find this one's pages."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from sglang_tiered.errors import ConfigError
from sglang_tiered.sharing.locality.url import parse_index_url

if TYPE_CHECKING:
    from sglang_tiered.sharing.settings import PeerSettings

__all__ = ["own_address"]


def own_address(settings: PeerSettings, port: int) -> str:
    """``tcp://IP:port``, with a host name looked up once, here. Raises ``ConfigError`` if there is
    no address."""
    host = settings.advertised_host or settings.listen_host
    address = _numeric(host)
    if address.is_unspecified:
        address = _numeric(_host_on_route_to(settings))
    shown = f"[{address}]" if address.version == 6 else str(address)
    return f"tcp://{shown}:{port}"


def _numeric(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return ipaddress.ip_address(found[0][4][0])
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(
            f"the host {host}, where other servers would find this one, has no address ({error})."
        ) from error


def _host_on_route_to(settings: PeerSettings) -> str:
    """This machine's address on the route to the index, without sending anything."""
    index = parse_index_url(settings.index_url).options
    if "host" not in index:  # a Unix socket
        return "127.0.0.1"
    try:
        found = socket.getaddrinfo(index["host"], index["port"], type=socket.SOCK_DGRAM)
        family, *_, target = found[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            host: str = probe.getsockname()[0]
            return host
    except (OSError, IndexError) as error:
        raise ConfigError(
            f"this server listens for others on {settings.listen_host}, and the address that "
            f"they reach it at is unknown ({error}); name one."
        ) from error
