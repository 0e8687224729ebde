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


def test_the_flag_wins_over_the_environment() -> None:
    other = {URL_VARIABLE: "redis://:pw@192.0.2.2"}
    assert resolve() is resolve(environment={URL_VARIABLE: ""}) is None
    assert resolve(tier_index=URL, environment=other).url == URL
    assert resolve(environment=other).url == "redis://:pw@192.0.2.2"


def test_pages_are_served_where_the_server_listens() -> None:
    for host, peer_host, expected in (
        ({}, {}, "127.0.0.1"),
        ({"host": "0.0.0.0"}, {}, "0.0.0.0"),
        ({"host": "0.0.0.0"}, {"tier_peer_host": "localhost"}, "127.0.0.1"),
    ):
        assert resolve(tier_index=URL, **host, **peer_host).host == expected


def test_each_rank_has_a_port_of_its_own(taken: int) -> None:
    port = free_ports(2)
    own = {"tier_index": URL, "tier_peer_host": QUIET_HOST, "num_ranks": 2}
    config = resolve(**own, tier_peer_port=str(port))
    assert [peer_settings(config, rank).listen_port for rank in range(2)] == [port, port + 1]
    with pytest.raises(ConfigError, match=f"--tier-peer-port {taken} is in use on {QUIET_HOST}"):
        resolve(**own, tier_peer_port=str(taken - 1))


def test_a_rank_follows_those_with_its_pages() -> None:
    """Of two servers with two replicas of two ranks each, and where names do not resolve yet."""
    config = resolve(tier_peers="a.invalid:31000,b.invalid:31000", num_ranks=4, host="127.0.0.1")
    assert config is not None and config.port == 31000
    for rank, ports in enumerate([(0, 2), (1, 3), (0, 2), (1, 3)]):
        settings = peer_settings(config, rank, num_ranks=4, tp_size=2)
        assert settings.ports == ports
        assert settings.listen_port == 31000 + rank
        assert [target.host for target in settings.peers] == ["a.invalid", "b.invalid"]


@pytest.mark.parametrize(
    ("explicit", "sentence"),
    [
        ({"tier_peer_port": "4000"}, "--tier-peer-port 4000 needs --tier-peers or --tier-index"),
        ({"tier_index": "http://:hunter2@host"}, "cannot be used; write redis://"),
        ({"tier_index": "redis://:hun/ter2@host"}, "--tier-index"),
        ({"tier_index": "redis://:hunter2@host?maint_notifications_config=1"}, "--tier-index"),
        (
            {"tier_index": URL, "tier_peer_port": "0"},
            "0 is not a whole number from 1 on",
        ),
        ({"tier_index": URL, "tier_peer_port": "65535", "num_ranks": 2}, "must be at most 65534"),
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
    config = resolve(tier_index=URL, tier_peer_keys=str(tmp_path))
    assert peer_settings(config, 0).keys_directory == str(tmp_path)
    os.chmod(tmp_path / "peer.key_secret", 0o644)
    with pytest.raises(ConfigError, match="can be read by others; chmod 600 it"):
        resolve(tier_index=URL, tier_peer_keys=str(tmp_path))


def test_sharing_beyond_this_machine_without_keys_warns(tmp_path: Path) -> None:
    make_keys(tmp_path, (PEER,))
    listed, local = {"tier_peers": "192.0.2.5:31000"}, {"host": "localhost"}
    for explicit, said in (
        ({"tier_index": URL, "host": "0.0.0.0"}, "--tier-peer-keys"),
        ({"tier_index": URL, **local}, "anyone who can write to the Redis"),
        ({**listed, "host": "0.0.0.0"}, "erase"),
    ):
        assert said in (exposure(resolve(**explicit)) or "")
        assert exposure(resolve(**explicit, tier_peer_keys=str(tmp_path))) is None
    for explicit in ({"tier_index": LOCAL_URL, **local}, {**listed, **local}):
        assert exposure(resolve(**explicit)) is None
