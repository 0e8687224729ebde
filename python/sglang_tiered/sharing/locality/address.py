"""What other servers are told to connect to."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from sglang_tiered.sharing.locality.url import parse_index_url

if TYPE_CHECKING:
    from sglang_tiered.sharing.settings import PeerSettings

__all__ = ["advertised_address"]

_EVERY_ADDRESS = {"0.0.0.0", "::", "*"}


def advertised_address(settings: PeerSettings, port: int) -> str:
    """``tcp://host:port`` for ``LocalityIndex.announce``. Resolves the host of the index, which may
    take a while; sends nothing."""
    host = settings.advertised_host or settings.listen_host
    if host in _EVERY_ADDRESS:
        host = _route_to_index(settings)
    host = host.strip("[]")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _route_to_index(settings: PeerSettings) -> str:
    """The local address that packets to the index would come from."""
    url = parse_index_url(settings.index_url)
    if url.host:
        with contextlib.suppress(OSError):
            kind = socket.SOCK_DGRAM  # connecting one picks a route and sends nothing
            for family, _, _, _, address in socket.getaddrinfo(url.host, url.port, type=kind):
                with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
    return "127.0.0.1"
