"""What listens already is found before a model is loaded, whatever the port is for."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from server_process import free_ports
from sglang_tiered import launch_server
from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.launch.ports import check_ports

FREE = {"port": 0}


@pytest.fixture
def taken() -> Iterator[int]:
    port = free_ports(2) + 1  # what is below it is free, too
    with socket.create_server(("127.0.0.1", port)):
        yield port


def test_second_prefill_server_is_refused_its_port(
    taken: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ranks registered over those of the first, whose requests then went astray."""
    command = ["--model-path", "m", "--port", "0", "--disaggregation-mode", "prefill"]
    more = ["--disaggregation-bootstrap-port", str(taken)]
    assert launch_server.main([*command, *more]) == 2
    said = capsys.readouterr().err
    assert f"--disaggregation-bootstrap-port {taken} is in use on 127.0.0.1" in said
    assert "another --disaggregation-bootstrap-port" in said


@pytest.mark.parametrize("serves_http", [True, False])
def test_default_bootstrap_port_is_looked_at(serves_http: bool) -> None:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", 8998))
        except OSError:
            pytest.skip("port 8998 of this machine is in use")
        listener.listen()
        prefill = {**FREE, "disaggregation_mode": "prefill"}
        with pytest.raises(ConfigError, match="--disaggregation-bootstrap-port 8998 is in use"):
            check_ports(prefill, serves_http=serves_http)
        check_ports({**prefill, "node_rank": 1})
        check_ports({**FREE, "disaggregation_mode": "decode"})


def events_at(endpoint: str, **more: Any) -> dict[str, Any]:
    return {"kv_events_config": json.dumps({"publisher": "zmq", "endpoint": endpoint, **more})}


@pytest.mark.parametrize("name", ["grpc", "nccl", "gated_launch", "smg_http_sidecar"])
def test_every_port_of_a_flag_is_looked_at(taken: int, name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}-port {taken} is in use"):
        check_ports({**FREE, f"{name}_port": taken})


def test_ports_of_kv_events_are_looked_at(taken: int) -> None:
    replicas = {**FREE, "attn_dp_size": 2}
    for given in (
        events_at(f"tcp://*:{taken}"),
        events_at(f"tcp://0.0.0.0:{taken - 1}"),
        events_at("tcp://*:0", replay_endpoint=f"tcp://*:{taken}"),
    ):
        with pytest.raises(ConfigError, match=f"--kv-events-config {taken} is in use"):
            check_ports({**replicas, **given})
    check_ports({**FREE, **events_at(f"tcp://127.0.0.1:{taken}")})  # connected to, not bound
    check_ports({**FREE, "kv_events_config": "no JSON"})
