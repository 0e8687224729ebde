"""Servers that name themselves in a real Redis, which may be slow, gone, empty, or full of what
somebody else wrote: it costs knowledge of new servers and nothing else."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis_server import RedisServer

from kit.waiting import eventually
from server_process import free_port
from sglang_tiered.checksummed import seal
from sglang_tiered.errors import TransferError
from sglang_tiered.sharing.membership import (
    VERSION,
    Membership,
    ServerRecord,
    read_record,
    read_servings,
)
from sglang_tiered.sharing.settings import Role, Serving, parse_index_url
from sglang_tiered.sharing.sync import PeerDiscovery

pytestmark = pytest.mark.timeout(120)

NAMESPACE = bytes(range(32))
PREFIX = f"sgt2:{{{NAMESPACE.hex()}}}"
RIGHTS = ["on", "nopass", "~sgt2:*", "+@read", "+@write", "+@connection"]  # as the README says


@pytest.fixture
def join(redis_server: RedisServer) -> Iterator[Callable[..., Membership]]:
    joined: list[Membership] = []

    def join(number: int, url: str = "", **changes: object) -> Membership:
        values = {"namespace": lambda: NAMESPACE, "host": "127.0.0.1", "timeout_s": 1.0}
        one = Membership(
            parse_index_url(url or redis_server.url),
            server=f"{number:032x}",
            port=7000 + number,
            expiry_s=2.0,
            **(values | changes),  # type: ignore[arg-type]
        )
        joined.append(one)
        return one

    yield join
    for one in joined:
        one.close()


def test_servers_find_each_other_until_they_leave(
    join: Callable[..., Membership], redis_server: RedisServer
) -> None:
    one, two = join(1), join(2)
    assert one.exchange() == ["tcp://127.0.0.1:7001"]
    both = {"tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002"}
    assert set(two.exchange()) == set(one.exchange()) == both
    two.close()
    assert one.exchange() == ["tcp://127.0.0.1:7001"]
    for name in redis_server.client.keys("*"):
        assert redis_server.client.pttl(name) > 0, name
    # One that is killed leaves by itself.
    other = join(3)
    other.exchange()
    eventually(lambda: len(one.exchange()) == 1, timeout_s=10.0)
    assert redis_server.client.scard(f"{PREFIX}:servers") == 1


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"garbage",
        seal(ServerRecord(VERSION + 1, "tcp://192.0.2.1:1")),
        seal(ServerRecord(VERSION, "ipc:///tmp/x")),
        seal(ServerRecord(VERSION, "tcp://name:1")),
        seal([VERSION]),
        b"x" * (1 << 20),
    ],
)
def test_what_another_wrote_is_no_server(
    join: Callable[..., Membership], redis_server: RedisServer, value: bytes
) -> None:
    assert read_record(value) is None
    redis_server.client.sadd(f"{PREFIX}:servers", "9" * 32)
    redis_server.client.set(f"{PREFIX}:server:{'9' * 32}", value)
    assert join(1).exchange() == ["tcp://127.0.0.1:7001"]


def test_a_dead_redis_costs_only_new_servers(
    join: Callable[..., Membership], redis_server: RedisServer
) -> None:
    one, two = join(1), join(2)
    two.exchange()
    told: list[list[str]] = []
    discovery = PeerDiscovery(
        (), (), membership=one, found=lambda found, _: told.append(found), every_s=0.05
    )
    try:
        eventually(lambda: told and len(told[-1]) == 2)
        for stop in (redis_server.pause, redis_server.kill):
            stop()
            eventually(lambda: discovery.trouble != "")
            assert redis_server.url.rpartition("/")[0].partition("//")[2] in discovery.trouble
            redis_server.resume() if stop == redis_server.pause else redis_server.start()
            eventually(lambda: discovery.trouble == "")
        two.exchange()
        eventually(lambda: len(told[-1]) == 2)
    finally:
        discovery.close()


@pytest.mark.parametrize("password", [None, "wrong-horse"])
def test_a_refused_login_never_shows_the_password(
    join: Callable[..., Membership], password: str | None
) -> None:
    with RedisServer(password="right-horse") as server:
        url = server.url.replace("right-horse", password) if password else server.url
        url = url if password else url.replace(":right-horse@", "")
        with pytest.raises(TransferError) as caught:
            join(1, url).exchange()
        said = f"{caught.value} {caught.value!r} {caught.value.__cause__} {join(2, url)!r}"
        assert "horse" not in said
        assert "password" in str(caught.value)
        assert join(3, server.url).exchange() == ["tcp://127.0.0.1:7003"]


def test_tls_is_used_and_the_certificate_looked_at(
    join: Callable[..., Membership], tmp_path: Path
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
    named = ("-keyout", key, "-out", certificate, "-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run([*command.split(), *named], check=True, capture_output=True)
    key.chmod(0o644)
    with RedisServer() as server:
        server.client.config_set("tls-cert-file", str(certificate))
        server.client.config_set("tls-key-file", str(key))
        server.client.config_set("tls-auth-clients", "no")
        try:
            server.client.config_set("tls-port", str(port := free_port()))
        except Exception:
            pytest.skip("this Redis has no TLS")
        good = f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}"
        assert join(1, good).exchange() == ["tcp://127.0.0.1:7001"]
        with pytest.raises(TransferError, match="no connection"):
            join(2, f"rediss://127.0.0.1:{port}").exchange()


def test_reader_names_nobody_and_reads_all(
    join: Callable[..., Membership], redis_server: RedisServer
) -> None:
    """As the front of a cluster reads them, whatever the models."""
    assert read_servings(redis_server.url, 1.0) == []
    one = Serving("http://127.0.0.1:30000", Role.AGGREGATED, 0)
    two = Serving("http://127.0.0.1:30001", Role.PREFILL, 0, 8998)
    for number, serving in enumerate((one, two)):
        joined = join(number, namespace=lambda number=number: bytes([number]) * 32)
        joined.serve(lambda _, serving=serving: serving)
        joined.exchange()
    join(3).exchange()  # serves nobody
    client = redis_server.client
    client.set("text", b"of somebody else")
    client.rpush("list", b"of somebody else")
    client.sadd("sgt2:routed", "text", "list", "none")
    before = sorted(client.keys())
    client.config_resetstat()
    assert sorted(read_servings(redis_server.url, 1.0)) == [one, two]
    assert sorted(client.keys()) == before
    assert "cmdstat_scan" not in client.info("commandstats"), "it walks what others keep there"
    redis_server.kill()
    with pytest.raises(TransferError, match="no connection"):
        read_servings(redis_server.url, 1.0)


def test_dead_servers_do_not_gather_for_routers(
    join: Callable[..., Membership], redis_server: RedisServer
) -> None:
    """Also those of whose namespace nobody is left."""
    client = redis_server.client
    client.sadd("sgt2:routed", *(f"sgt2:{{{number}}}:server:x" for number in range(5)))
    client.sadd("sgt2:routed", "of-others")  # this user may not even ask for that
    client.set("of-others", b"")
    client.execute_command("ACL", "SETUSER", "server", *RIGHTS)
    one = join(9, redis_server.url.replace("redis://", "redis://server:any@"))
    one.serve(lambda _: Serving("http://127.0.0.1:30009", Role.AGGREGATED, 0))
    eventually(lambda: one.exchange() and client.scard("sgt2:routed") == 1)
    assert client.pttl("sgt2:routed") > 0, "it outlasts the last of them"
