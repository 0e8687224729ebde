"""Checks the flags of sharing between servers: hosts, ports and keys of this machine."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sglang_tiered.config import IndexConfig
from sglang_tiered.errors import ConfigError
from sglang_tiered.extras import require
from sglang_tiered.flags import flags_of, refuse_given, values_of
from sglang_tiered.integration.launch.ports import try_port
from sglang_tiered.integration.storage.tiers import peer_settings
from sglang_tiered.wire.keys import PEER, load_keys

if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = ["URL_VARIABLE", "exposure", "resolve_index"]

URL_VARIABLE = "SGLANG_TIERED_INDEX_URL"
"""Replaces ``--tier-index``: every user of a machine can read a command line."""

DEFAULT_HOST = "127.0.0.1"  # of SGLang
MAX_PORT = 65535


def resolve_index(
    explicit: Mapping[str, Any], num_ranks: int, environment: Mapping[str, str] = os.environ
) -> IndexConfig | None:
    """Check the given flags; None without a URL. Raises ``ConfigError``, which never names a
    password; reads keys, and tries the ports, but keeps nothing."""
    url = explicit.get("tier_index") or environment.get(URL_VARIABLE)
    if not url:
        others = {**explicit, "tier_index": None}
        refuse_given(others, flags_of(IndexConfig), "needs --tier-index; pass it, or drop this")
        return None
    require("--tier-index", "redis")
    pp_size = explicit.get("pp_size") or 1
    if pp_size > 1:
        raise ConfigError(
            f"--tier-index cannot run with --pp-size {pp_size}, whose stages cannot purge what "
            "another server purged in the same step; drop one of them."
        )
    values = values_of(IndexConfig, explicit)
    host = _address(values.get("host") or explicit.get("host") or DEFAULT_HOST)
    _try_ports(values.get("port"), host, num_ranks)
    config = IndexConfig(**{**values, "url": url, "host": host})
    peer_settings(config, 0)
    if config.keys_directory is not None:
        load_keys(Path(config.keys_directory), PEER)
    return config


def exposure(config: IndexConfig | None) -> str | None:
    """Return a sentence for the operator if other machines can share without keys."""
    if config is None or config.keys_directory is not None:
        return None
    if ipaddress.ip_address(config.host).is_loopback and _is_local(config.url):
        return None
    return (
        f"--tier-index without --tier-peer-keys: anyone who reaches {config.host} and knows a "
        "page's key can read the page, and anyone who can write to the Redis can make this server "
        "use forged pages; pass --tier-peer-keys, or let only these servers reach both."
    )


def _is_local(url: str) -> bool:
    """Whether only processes of this machine reach that Redis, as far as its address says."""
    parts = urlsplit(url)
    if parts.scheme == "unix" or parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False


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
    if first is None:
        _try(host, 0)
        return
    last = MAX_PORT - num_ranks + 1
    if not 1 <= first <= last:
        raise ConfigError(f"--tier-peer-port {first} must be from 1 to {last}; drop it for any.")
    for port in range(first, first + num_ranks):
        _try(host, port)


def _try(host: str, port: int) -> None:
    """Raise ``ConfigError`` where this machine cannot listen."""
    try:
        try_port("--tier-peer-port", host, port, "pass another, or drop it for any free one.")
    except OSError as error:
        raise ConfigError(
            f"--tier-peer-host {host} cannot be listened on ({error.strerror}); pass an address of "
            "this machine."
        ) from error
