"""Envoy's configuration, and the files in which it finds the servers. Plain values and files; no
process.

Two listeners: the outer one, which clients reach, takes our headers away from them and asks again
after a failure; the inner one asks the picker and follows its answer. So each try is picked anew.
Only hosts of a cluster are followed, whatever a header says.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from sglang_tiered.route.settings import RouteConfig

__all__ = [
    "CLUSTERS",
    "DESTINATION",
    "OWN_HEADERS",
    "PREFILLER",
    "SUBSET",
    "configuration",
    "split_address",
    "write_members",
]

DESTINATION, PREFILLER = "x-gateway-destination-endpoint", "x-prefiller-host-port"
SUBSET = "x-gateway-destination-endpoint-subset"
OWN_HEADERS = (
    DESTINATION,
    PREFILLER,
    SUBSET,
    "x-override-rid",
    "x-override-bootstrap-host",
    "x-override-bootstrap-port",
    "x-override-bootstrap-room",
    "x-override-conversation-id",
    "x-override-priority",
    "x-override-routed-dp-rank",
    "x-override-disagg-prefill-dp-rank",
)
"""What no client may say. ``x-override-*`` change a request within SGLang."""

CLUSTERS = ("pool", "decode", "prefill")
"""A file each; ``pool`` holds the servers that do both."""

PATHS = ("/v1/", "/generate", "/health", "/ready", "/model_info", "/get_model_info")
"""What is passed on, by prefix. The rest of a server's calls are its operator's."""

BUFFER_BYTES = 16 << 20
NUM_RETRIES = 2
_MANY = 1 << 20
_LIMITS = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
# Envoy's own are three retries at a time and 1,024 requests, of answers that take minutes.
_UNBOUNDED = {"thresholds": [dict.fromkeys(_LIMITS, _MANY)]}
_TYPE = "@type"
_URL = "type.googleapis.com/envoy."


def _extension(name: str, message: str, **fields: Any) -> dict[str, Any]:
    return {"name": f"envoy.{name}", "typed_config": {_TYPE: _URL + message, **fields}}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[HOST]:PORT``. Raises ``ValueError``."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def write_members(directory: Path, cluster: str, addresses: Iterable[str], version: int) -> None:
    """Replace the file of a cluster by one with these ``IP:PORT``. Envoy sees the rename, and takes
    a file that differs; ``version`` is for people."""
    hosts = [
        {"endpoint": {"address": _address(*split_address(address))}}
        for address in sorted(addresses)
    ]
    answer = {
        "version_info": str(version),
        "resources": [
            {
                _TYPE: f"{_URL}config.endpoint.v3.ClusterLoadAssignment",
                "cluster_name": cluster,
                "endpoints": [{"lb_endpoints": hosts}],
            }
        ],
    }
    new = directory / f".{cluster}.new"
    new.write_text(json.dumps(answer), encoding="utf-8")
    os.replace(new, directory / f"{cluster}.json")


def _http2() -> dict[str, Any]:
    name = "extensions.upstreams.http.v3.HttpProtocolOptions"
    options = {_TYPE: _URL + name, "explicit_http_config": {"http2_protocol_options": {}}}
    return {f"envoy.{name}": options}


def _servers(cluster: str, header: str, members: Path) -> dict[str, Any]:
    """Follow the header to a host of the cluster; without it, or where it names none, take the one
    with the fewest requests of those that say that they are ready."""
    least = _extension(
        "load_balancing_policies.least_request",
        "extensions.load_balancing_policies.least_request.v3.LeastRequest",
    )
    followed = _extension(
        "load_balancing_policies.override_host",
        "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"header": header}],
        fallback_policy={"policies": [{"typed_extension_config": least}]},
    )
    source = {
        "path": str(members / f"{cluster}.json"),
        "watched_directory": {"path": str(members)},
    }
    check = {
        "timeout": "1s",
        "interval": "1s",
        "no_traffic_interval": "1s",
        "unhealthy_threshold": 1,
        "healthy_threshold": 1,
        "http_health_check": {"path": "/ready"},
    }
    return {
        "name": cluster,
        "type": "EDS",
        "circuit_breakers": _UNBOUNDED,
        "connect_timeout": "0.5s",
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "eds_cluster_config": {
            "service_name": cluster,
            "eds_config": {"resource_api_version": "V3", "path_config_source": source},
        },
        "load_balancing_policy": {"policies": [{"typed_extension_config": followed}]},
        "health_checks": [check],
    }


def _picker(config: RouteConfig) -> dict[str, Any]:
    check = {
        "timeout": "1s",
        "interval": "0.5s",
        "no_traffic_interval": "0.5s",
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "grpc_health_check": {},
    }
    host = {"endpoint": {"address": _address(config.picker_host, config.grpc_port)}}
    return {
        "name": "picker",
        "type": "STATIC",
        "circuit_breakers": _UNBOUNDED,
        "connect_timeout": "0.25s",
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "typed_extension_protocol_options": _http2(),
        "health_checks": [check],
        "load_assignment": {"cluster_name": "picker", "endpoints": [{"lb_endpoints": [host]}]},
    }


def _inner() -> dict[str, Any]:
    """The inner listener, as a cluster of the outer one."""
    host = {"address": {"envoy_internal_address": {"server_listener_name": "picked"}}}
    raw = _extension(
        "transport_sockets.raw_buffer",
        "extensions.transport_sockets.raw_buffer.v3.RawBuffer",
    )
    endpoints = [{"lb_endpoints": [{"endpoint": host}]}]
    return {
        "name": "picked",
        "circuit_breakers": _UNBOUNDED,
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "load_assignment": {"cluster_name": "picked", "endpoints": endpoints},
        "typed_extension_protocol_options": _http2(),
        "transport_socket": _extension(
            "transport_sockets.internal_upstream",
            "extensions.transport_sockets.internal_upstream.v3.InternalUpstreamTransport",
            transport_socket=raw,
        ),
    }


def _chain(name: str, routes: list[Any], filters: list[Any], **more: Any) -> list[dict[str, Any]]:
    hosts: dict[str, Any] = {"name": "all", "domains": ["*"], "routes": routes}
    if name == "front":
        hosts["include_request_attempt_count"] = True
    manager = _extension(
        "filters.network.http_connection_manager",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=name,
        stream_idle_timeout="0s",
        route_config={"name": name, "virtual_hosts": [hosts]},
        http_filters=filters,
        **more,
    )
    return [{"filters": [manager]}]


def _outer_routes() -> list[Any]:
    retry = {
        "retry_on": "connect-failure,reset,refused-stream,retriable-status-codes",
        "retriable_status_codes": [502, 503, 504],
        "num_retries": NUM_RETRIES,
        "retry_back_off": {"base_interval": "0.025s", "max_interval": "0.25s"},
    }
    to = {"cluster": "picked", "timeout": "0s", "retry_policy": retry}
    nothing = {"inline_string": '{"error":{"message":"this front passes on no such path"}}\n'}
    passed = [{"match": {"prefix": path}, "route": to} for path in PATHS]
    return [
        *passed,
        {"match": {"prefix": "/"}, "direct_response": {"status": 404, "body": nothing}},
    ]


def _inner_routes() -> list[Any]:
    named = {"name": PREFILLER, "present_match": True}
    mirror = [{"cluster": "prefill", "disable_shadow_host_suffix_append": True}]
    pair = {"cluster": "decode", "timeout": "0s", "request_mirror_policies": mirror}
    return [
        {"match": {"prefix": "/", "headers": [named]}, "route": pair},
        {"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "0s"}},
    ]


def configuration(config: RouteConfig, directory: Path, members: Path) -> dict[str, Any]:
    """Return the whole configuration. The admin interface is a socket in ``directory``."""
    router = _extension(
        "filters.http.router",
        "extensions.filters.http.router.v3.Router",
        suppress_envoy_headers=True,
    )
    asks = _extension(
        "filters.http.ext_proc",
        "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}, "timeout": "600s"},
        failure_mode_allow=True,
        message_timeout=f"{config.pick_s:g}s",
        processing_mode={
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            "response_body_mode": "NONE",
        },
        metadata_options={"receiving_namespaces": {"untyped": ["envoy.lb"]}},
        response_attributes=["upstream.address"],
    )
    strips = _extension(
        "http.early_header_mutation.header_mutation",
        "extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
        mutations=[{"remove": header} for header in OWN_HEADERS],
    )
    front = {
        "name": "front",
        "address": _address(config.host, config.port),
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "filter_chains": _chain(
            "front", _outer_routes(), [router], early_header_mutation_extensions=[strips]
        ),
    }
    picked = {
        "name": "picked",
        "internal_listener": {},
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "filter_chains": _chain(
            "picked", _inner_routes(), [asks, router], preserve_external_request_id=True
        ),
    }
    internal = _extension(
        "bootstrap.internal_listener",
        "extensions.bootstrap.internal_listener.v3.InternalListener",
    )
    headers = {"pool": DESTINATION, "decode": DESTINATION, "prefill": PREFILLER}
    return {
        "node": {"id": "front", "cluster": "front"},
        "admin": {"address": {"pipe": {"path": str(directory / "admin"), "mode": 0o600}}},
        "bootstrap_extensions": [internal],
        "static_resources": {
            "listeners": [front, picked],
            "clusters": [
                _inner(),
                _picker(config),
                *(_servers(cluster, headers[cluster], members) for cluster in CLUSTERS),
            ],
        },
    }
