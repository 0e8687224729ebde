"""Which addresses belong to this machine, and from which others decode takes KV."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from sglang_tiered.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence


Address = tuple[str, int]
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_networks(flag: str, text: str) -> tuple[str, ...]:
    """Parse addresses and networks with commas between them. Raises ``ConfigError``."""
    networks = []
    for part in text.split(","):
        try:
            networks.append(str(ipaddress.ip_network(part.strip(), strict=False)))
        except ValueError:
            raise ConfigError(
                f"{flag} {text}: {part.strip()!r} is neither an address nor a network; write "
                "192.0.2.7, 192.0.2.0/24 or several with commas."
            ) from None
    return tuple(networks)


def is_own_address(host: str) -> bool:
    """Whether a numeric address belongs to this machine: the system talks to such an address, and
    to no other, from the same address. (With ``ip_nonlocal_bind`` a bind proves nothing.)"""
    address = _parsed(host)
    if address is None:
        return False
    if address.is_loopback or address.is_unspecified:
        return True
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))  # sends nothing
            source = probe.getsockname()[0]
    except OSError:
        return False
    return ipaddress.ip_address(source) == address


def check_is_allowed(host: str, networks: Sequence[str]) -> None:
    """Raises ``TransferError`` if a numeric address is neither this machine's nor in one of
    ``networks``. A client names the address, and decode would take what it sends as KV."""
    address = _parsed(host)
    if address is not None:
        if any(address in ipaddress.ip_network(network) for network in networks):
            return
        if is_own_address(host):
            return
    if networks:
        raise TransferError(
            f"{host} is neither on this machine nor in --transfer-allow {','.join(networks)}; name "
            "it there if decode is to take KV from it."
        )
    raise TransferError(
        f"{host} is not on this machine, and without --transfer-keys decode takes KV from others "
        "only where --transfer-allow names them; start it with one of the two."
    )


def _parsed(host: str) -> IPAddress | None:
    if not isinstance(host, str):
        return None  # ``ipaddress`` would take a number for an address
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
