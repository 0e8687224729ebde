"""Checks the flags of sharing between servers: hosts, ports and keys of this machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_tiered.errors import ConfigError
from sglang_tiered.extras import require
from sglang_tiered.flags import flags_of, refuse_given, values_of
from sglang_tiered.integration.launch.ports import try_port
from sglang_tiered.integration.storage.tiers import peer_settings
from sglang_tiered.loopback import is_loopback, is_loopback_url
from sglang_tiered.remote_config import PeerConfig
from sglang_tiered.sharing.settings import parse_targets
from sglang_tiered.wire.keys import PEER, load_keys

if TYPE_CHECKING:
    from collections.abc import Mapping


URL_VARIABLE = "SGLANG_TIERED_INDEX_URL"
"""Replaces ``--tier-index``: every user of a machine can read a command line."""

DEFAULT_HOST = "127.0.0.1"  # of SGLang
MAX_PORT = 65535


def resolve_peers(
    explicit: Mapping[str, Any], num_ranks: int, environment: Mapping[str, str] = os.environ
) -> PeerConfig | None:
    """Check the given flags; None where no other server is named. Raises ``ConfigError``, which
    never names a password; reads keys, and tries the ports, but keeps nothing."""
    url = explicit.get("tier_index") or environment.get(URL_VARIABLE) or None
    servers = explicit.get("tier_peers") or None
    if url is None and servers is None:
        others = {**explicit, "tier_index": None, "tier_peers": None}
        wanted = "needs --tier-peers or --tier-index; pass one, or drop this"
        refuse_given(others, flags_of(PeerConfig), wanted)
        return None
    if url is not None:
        require("--tier-index", "redis")
    pp_size = explicit.get("pp_size") or 1
    if pp_size > 1:
        flag = "--tier-index" if servers is None else "--tier-peers"
        raise ConfigError(
            f"{flag} cannot run with --pp-size {pp_size}, whose stages cannot erase what "
            "another server erased in the same step; drop one of them."
        )
    values = values_of(PeerConfig, explicit)
    host = _address(values.get("host") or explicit.get("host") or DEFAULT_HOST)
    port = values.get("port")
    if port is None and servers is not None:
        port = _own_port(servers)
    _try_ports(port, host, num_ranks)
    given = {"servers": servers, "url": url, "host": host, "port": port}
    config = PeerConfig(**{**values, **given})
    peer_settings(config, 0)
    if config.keys_directory is not None:
        load_keys(Path(config.keys_directory), PEER)
    return config


def _own_port(servers: str) -> int:
    """The port that all servers have. Raises ``ConfigError`` where they have several."""
    ports = {target.port for target in parse_targets(servers)}
    if len(ports) > 1:
        raise ConfigError(
            "--tier-peers names servers of several ports, so the others would not know this one's; "
            "pass --tier-peer-port."
        )
    return ports.pop()


def exposure(config: PeerConfig | None) -> str | None:
    """Return a sentence for the operator if other machines can share without keys."""
    if config is None or config.keys_directory is not None:
        return None
    url = config.url
    is_local = url is None or url.startswith("unix:") or is_loopback_url(url)
    if is_loopback(config.host) and is_local:
        return None
    redis = "" if url is None else ", and anyone who can write to the Redis,"
    both = "this port" if url is None else "both"
    return (
        f"pages are shared without --tier-peer-keys: anyone who reaches {config.host} can erase "
        f"pages here and read those whose keys it knows, and who is on the way{redis} can make "
        f"this server use forged ones; pass --tier-peer-keys, or let only these servers reach "
        f"{both}."
    )


def _address(host: str) -> str:
    """Resolve a name to an address, because ZeroMQ binds no names."""
    family = socket.AF_INET6 if ":" in host else socket.AF_UNSPEC
    try:
        found = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"--tier-peer-host {host} is no host that this machine knows ({error.strerror}); pass "
            "an address of it."
        ) from error
    return str(found[0][4][0])


def _try_ports(first: int | None, host: str, num_ranks: int) -> None:
    """Raise ``ConfigError`` unless this machine can listen on a port for each rank."""
    last = MAX_PORT - num_ranks + 1
    if first is not None and first > last:
        raise ConfigError(f"--tier-peer-port {first} must be at most {last}; drop it for any.")
    try:
        for port in (0,) if first is None else range(first, first + num_ranks):
            try_port("--tier-peer-port", host, port, "pass another, or drop it for any free one.")
    except OSError as error:
        raise ConfigError(
            f"--tier-peer-host {host} cannot be listened on ({error.strerror}); pass an address of "
            "this machine."
        ) from error
