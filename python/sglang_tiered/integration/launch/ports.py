"""Refuses ports that are in use before a model is loaded.

SGLang binds its ports late, and where one is taken it hangs, prints a traceback, or goes on. A
second prefill server with the same bootstrap port registers its ranks over those of the first.
"""

from __future__ import annotations

import errno
import json
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.storage.shards import sizes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


ANYWHERE = "0.0.0.0"


def check_ports(explicit: Mapping[str, Any], *, serves_http: bool = True) -> None:
    """Raise ``ConfigError`` for a port of SGLang's that this process cannot bind, or is to bind
    twice. ``explicit``: the arguments that were given. Only the first node of several listens."""
    if explicit.get("node_rank"):
        return
    bound: dict[int, str] = {}
    for flag, host, port in _ports(explicit, serves_http):
        if not 0 <= port <= 65535:
            raise ConfigError(f"{flag} {port} is not a port from 0 to 65535.")
        other = bound.setdefault(port, flag)
        if port and other != flag:
            raise ConfigError(f"{flag} {port} is the port of {other} too; pass another.")
        with suppress(OSError):  # the host may be a name, which SGLang judges
            try_port(flag, host, port, f"stop what listens there or pass another {flag}.")


def try_port(flag: str, host: str, port: int, way_out: str) -> None:
    """Raise ``ConfigError`` if something listens on the port, and ``OSError`` for an address that
    this machine does not have."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ConfigError(f"{flag} {port} is in use on {host}; {way_out}") from error


def _ports(explicit: Mapping[str, Any], serves_http: bool) -> Iterator[tuple[str, str, int]]:
    """Flag, host and port of each port that SGLang will bind by its flags."""
    host, switches = explicit.get("host", "127.0.0.1"), explicit.get("enable_pd_role_switch")
    is_prefill = explicit.get("disaggregation_mode") == "prefill" or switches
    for name, where, is_bound, default in (  # of SGLang
        ("port", host, serves_http, 30000),
        ("disaggregation_bootstrap_port", host, is_prefill, 8998),
        ("encoder_bootstrap_port", host, explicit.get("language_only"), 8997),
        ("grpc_port", host, True, None),
        ("smg_http_sidecar_port", host, True, None),
        ("gated_launch_port", host, True, None),
        ("nccl_port", ANYWHERE, True, None),
    ):
        port = explicit.get(name, default)
        if is_bound and port is not None:
            yield "--" + name.replace("_", "-"), where, port
    yield from _event_ports(explicit)


def _event_ports(explicit: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """The ports of KV events, one for each replica. SGLang binds an address that is a wildcard and
    connects to any other; what it cannot read it refuses itself."""
    try:
        events = json.loads(explicit.get("kv_events_config") or "{}")
        if events.get("publisher") != "zmq":
            return
        for endpoint in (events.get("endpoint", "tcp://*:5557"), events.get("replay_endpoint")):
            address, _, port = (endpoint or "").removeprefix("tcp://").rpartition(":")
            if address in ("*", ANYWHERE):
                for replica in range(sizes_of(explicit).num_replicas):
                    yield "--kv-events-config", ANYWHERE, int(port) + replica
    except (AttributeError, TypeError, ValueError):
        return
