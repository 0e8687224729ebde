"""The flags of sharing between servers: one sentence for what cannot work, before anything is
touched, and never a password in it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from server_process import free_ports
from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.launch.peer_flags import URL_VARIABLE, exposure, resolve_peers
from sglang_tiered.integration.storage.tiers import peer_settings
from sglang_tiered.remote_config import PeerConfig
from sglang_tiered.wire.keys import PEER, make_keys

URL, LOCAL_URL = "redis://192.0.2.1:6379/0", "redis://127.0.0.1:6379/0"


def resolve(
    *, num_ranks: int = 1, environment: dict[str, str] | None = None, **explicit: Any
) -> PeerConfig | None:
    return resolve_peers(explicit, num_ranks, environment or {})


# Of this machine, and nobody else's: ports next to each other are free or taken as a test says.
QUIET_HOST = "127.77.0.1"


@pytest.fixture
def taken() -> Any:
    with socket.create_server((QUIET_HOST, 0)) as server:
        yield server.getsockname()[1]


def test_without_a_url_nothing_is_shared() -> None:
    assert resolve() is None
    assert resolve(host="127.0.0.1") is None
    assert resolve(environment={URL_VARIABLE: ""}) is None


def test_the_flag_wins_over_the_environment() -> None:
    other = {URL_VARIABLE: "redis://:pw@192.0.2.2"}
    flag, variable = resolve(tier_index=URL, environment=other), resolve(environment=other)
    assert flag is not None and flag.url == URL
    assert variable is not None and variable.url == "redis://:pw@192.0.2.2"


@pytest.mark.parametrize(
    ("explicit", "expected"),
    [
        ({}, "127.0.0.1"),
        ({"host": "127.0.0.2"}, "127.0.0.2"),
        ({"host": "0.0.0.0"}, "0.0.0.0"),
        ({"host": "::"}, "::"),
        ({"host": "0.0.0.0", "tier_peer_host": "127.0.0.3"}, "127.0.0.3"),
        ({"tier_peer_host": "localhost"}, "127.0.0.1"),
    ],
)
def test_pages_are_served_where_the_server_listens(explicit: dict[str, str], expected: str) -> None:
    if expected == "::" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    config = resolve(tier_index=URL, **explicit)
    assert config.host == expected


def test_each_rank_has_a_port_of_its_own(taken: int) -> None:
    config = resolve(tier_index=URL)
    assert [peer_settings(config, rank).listen_port for rank in range(2)] == [0, 0]
    port = free_ports(2)
    config = resolve(tier_index=URL, tier_peer_host=QUIET_HOST, tier_peer_port=str(port))
    assert [peer_settings(config, rank).listen_port for rank in range(2)] == [port, port + 1]
    with pytest.raises(ConfigError, match=f"--tier-peer-port {taken} is in use on {QUIET_HOST}"):
        resolve(
            tier_index=URL, tier_peer_host=QUIET_HOST, tier_peer_port=str(taken - 1), num_ranks=2
        )


def test_a_rank_follows_those_with_its_pages() -> None:
    """Of two servers with two replicas of two ranks each, and where names do not resolve yet."""
    config = resolve(tier_peers="a.invalid:31000,b.invalid:31000", num_ranks=4, host="127.0.0.1")
    assert config is not None and config.port == 31000
    for rank, ports in enumerate([(0, 2), (1, 3), (0, 2), (1, 3)]):
        settings = peer_settings(config, rank, num_ranks=4, tp_size=2)
        assert settings.ports == ports
        assert settings.listen_port == 31000 + rank
        assert [target.host for target in settings.peers] == ["a.invalid", "b.invalid"]


def test_everything_reaches_the_settings(tmp_path: Path) -> None:
    make_keys(tmp_path, (PEER,))
    config = resolve(tier_index=URL, tier_peer_host="127.0.0.1", tier_peer_keys=str(tmp_path))
    settings = peer_settings(config, 0)
    assert settings.index is not None and settings.index.shown == URL
    assert settings.listen_host == "127.0.0.1"
    assert settings.keys_directory == str(tmp_path)


@pytest.mark.parametrize(
    ("explicit", "sentence"),
    [
        ({"tier_peer_port": "4000"}, "--tier-peer-port 4000 needs --tier-peers or --tier-index"),
        ({"tier_peer_keys": "x"}, "--tier-peer-keys x needs --tier-peers or --tier-index"),
        ({"tier_index": "http://:hunter2@host"}, "cannot be used; write redis://"),
        ({"tier_index": "redis://:hun/ter2@host"}, "--tier-index"),
        ({"tier_index": "redis://:hunter2@host?maint_notifications_config=1"}, "--tier-index"),
        ({"tier_index": URL, "tier_peer_port": "0"}, "--tier-peer-port 0 must be from 1 to 65535"),
        ({"tier_index": URL, "tier_peer_port": "65536"}, "must be from 1 to 65535"),
        ({"tier_index": URL, "tier_peer_port": "65535", "num_ranks": 2}, "be from 1 to 65534"),
        ({"tier_index": URL, "tier_peer_port": "http"}, "http is not a whole number"),
        ({"tier_index": URL, "tier_peer_host": "192.0.2.1"}, "cannot be listened on"),
        ({"tier_index": URL, "tier_peer_host": "no such host"}, "is no host that this machine"),
        ({"tier_index": URL, "pp_size": 2}, "--tier-index cannot run with --pp-size 2"),
        ({"tier_index": URL, "tier_peer_keys": "/nowhere"}, "/nowhere has no peer.key_secret"),
        ({"tier_peers": "host"}, "--tier-peers 'host' is no address; write HOST:PORT"),
        ({"tier_peers": ","}, "--tier-peers names no server"),
        ({"tier_peers": "a:1,b:2"}, "--tier-peers names servers of several ports"),
        ({"tier_peers": "a:1", "pp_size": 2}, "--tier-peers cannot run with --pp-size 2"),
    ],
)
def test_what_cannot_work_leaks_no_password(explicit: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(**explicit)
    message = str(caught.value)
    assert sentence in message and message.endswith(".") and "\n" not in message
    assert "hun" not in message and "ter2" not in message


def test_keys_that_others_can_read_are_refused(tmp_path: Path) -> None:
    make_keys(tmp_path, (PEER,))
    os.chmod(tmp_path / "peer.key_secret", 0o644)
    with pytest.raises(ConfigError, match="can be read by others; chmod 600 it"):
        resolve(tier_index=URL, tier_peer_keys=str(tmp_path))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_sharing_beyond_this_machine_without_keys_warns(host: str, tmp_path: Path) -> None:
    if host == "::" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    warning = exposure(resolve(tier_index=URL, host=host))
    assert warning is not None and "--tier-peer-keys" in warning and host in warning
    make_keys(tmp_path, (PEER,))
    assert exposure(resolve(tier_index=URL, host=host, tier_peer_keys=str(tmp_path))) is None
    assert exposure(resolve(tier_index=LOCAL_URL, host="localhost")) is None
    assert exposure(resolve(tier_peers="192.0.2.5:31000", host="localhost")) is None
    warning = exposure(resolve(tier_peers="192.0.2.5:31000", host=host))
    assert warning is not None and "erase" in warning and "Redis" not in warning
    assert exposure(None) is None


def test_a_redis_elsewhere_without_keys_warns() -> None:
    warning = exposure(resolve(tier_index=URL, host="localhost"))
    assert warning is not None and "anyone who can write to the Redis" in warning
    for url in ("redis://localhost:6379/0", "redis://[::1]/0", "unix:///run/redis.sock"):
        assert exposure(resolve(tier_index=url, host="localhost")) is None
