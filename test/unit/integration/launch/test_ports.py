"""What listens already is found before a model is loaded, whatever the port is for."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from server_process import free_port
from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.launch.ports import check_ports


@pytest.fixture
def taken() -> Iterator[int]:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        yield port


def test_second_prefill_server_is_refused_its_port(taken: int) -> None:
    """Its ranks registered over those of the first, whose requests then went astray."""
    prefill = {"port": 0, "disaggregation_mode": "prefill", "disaggregation_bootstrap_port": taken}
    said = f"--disaggregation-bootstrap-port {taken} is in use on 127.0.0.1"
    for serves_http in (True, False):
        with pytest.raises(ConfigError, match=said):
            check_ports(prefill, serves_http=serves_http)
    check_ports({**prefill, "node_rank": 1})
    check_ports({**prefill, "disaggregation_mode": "decode"})


@pytest.mark.parametrize("name", ["grpc_port", "nccl_port", "kv_events_config"])
def test_every_port_of_a_flag_is_looked_at(taken: int, name: str) -> None:
    events = json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{taken}"})
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} {taken} is in use"):
        check_ports({"port": 0, name: events if "events" in name else taken})
