"""Envoy's configuration, and the files in which it finds the servers. Plain values and files; no
process."""

from __future__ import annotations

import contextlib
import json
import os
from importlib import resources
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from sglang_tiered.route.settings import RouteConfig


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


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[HOST]:PORT``. Raises ``ValueError``."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def write_members(directory: Path, cluster: str, addresses: Iterable[str]) -> None:
    """Have the file of a cluster name these ``IP:PORT``. Envoy sees one that differs."""
    hosts = []
    for address in sorted(addresses):
        host, port = split_address(address)
        there = {"socket_address": {"address": host, "port_value": port}}
        hosts.append({"endpoint": {"address": there}})
    assignment = {
        "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": cluster,
        "endpoints": [{"lb_endpoints": hosts}],
    }
    text, file = json.dumps({"resources": [assignment]}), directory / f"{cluster}.json"
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        new = directory / f".{cluster}.new"
        new.write_text(text, encoding="utf-8")
        os.replace(new, file)


def read_members(directory: Path) -> dict[str, str]:
    """Return the clusters of the servers that an earlier picker wrote, by their ``IP:PORT``."""
    found = {}
    for cluster in CLUSTERS:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            text = (directory / f"{cluster}.json").read_text(encoding="utf-8")
            (told,) = json.loads(text)["resources"][0]["endpoints"]
            for host in told["lb_endpoints"]:
                there = host["endpoint"]["address"]["socket_address"]
                name, port = there["address"], there["port_value"]
                found[f"[{name}]:{port}" if ":" in name else f"{name}:{port}"] = cluster
    return found


def configuration(config: RouteConfig, directory: Path, members: Path) -> dict[str, Any]:
    """Return the whole configuration. The admin interface is a socket in ``directory``."""
    text = (resources.files(__package__) / "envoy.yaml").read_text(encoding="utf-8")
    told = {
        "admin": str(directory / "admin"),
        "members": str(members),
        "host": config.host,
        "port": config.port,
        "picker_host": config.picker_host,
        "picker_port": config.grpc_port,
        "pick_timeout": f"{config.pick_s:g}s",
        "prefiller": PREFILLER,
        "certificate": config.certificate,
        "certificate_key": config.certificate_key,
        "stripped": [{"remove": header} for header in OWN_HEADERS],
    }
    template = yaml.safe_load(text)
    parts = template.pop("parts")
    if config.certificate is not None:
        template["static_resources"]["listeners"][0]["filter_chains"][0] |= parts["tls"]
    made: dict[str, Any] = _filled(template, told)
    for cluster in CLUSTERS:
        told |= {"cluster": cluster, "file": str(members / f"{cluster}.json")}
        told["named_in"] = PREFILLER if cluster == "prefill" else DESTINATION
        made["static_resources"]["clusters"].append(_filled(parts["servers"], told))
    return made


def _filled(part: Any, told: dict[str, Any]) -> Any:
    if isinstance(part, dict):
        return {name: _filled(value, told) for name, value in part.items()}
    if isinstance(part, list):
        return [_filled(value, told) for value in part]
    is_filled_in = isinstance(part, str) and part.startswith("$")
    return told[part[1:]] if is_filled_in else part
