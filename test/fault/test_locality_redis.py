"""A Redis that dies, stalls, comes back empty, refuses or was filled with rubbish: misses only."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import pytest
from locality_servers import EXPIRY_S, NAMES, NAMESPACE, Servers, key
from redis_server import RedisServer

from kit.waiting import eventually
from server_process import free_port
from sglang_tiered.sharing.locality import connection
from sglang_tiered.sharing.locality.formats import (
    Delta,
    Role,
    ServerRecord,
    Serving,
    pack_delta,
    pack_record,
    unpack_serving,
)
from sglang_tiered.sharing.locality.redis_keys import RedisKeys
from sglang_tiered.sharing.locality.url import parse_index_url

if TYPE_CHECKING:
    from pathlib import Path

    from locality_servers import Server

PASSWORD = "not-for-the-log"


def test_a_redis_not_yet_there_delays_nothing(redis_server: RedisServer) -> None:
    redis_server.kill()
    with Servers(redis_server.url) as servers:
        one, two = servers.open([1]), servers.open([2])
        assert one.finds(2) == [False]
        eventually(lambda: one.index.stats().trouble == "no connection")
        assert not one.index.stats().connected
        redis_server.start()
        eventually(lambda: one.finds(2) == [True] and two.finds(1) == [True])
        eventually(lambda: one.index.stats().trouble == "" and one.index.connected)


@pytest.mark.parametrize("how", ["kill", "stop", "pause"])
def test_without_redis_nothing_is_found_within_the_expiry(
    servers: Servers, redis_server: RedisServer, how: str
) -> None:
    one, two = servers.open([1]), servers.open([2])
    servers.know_each_other()
    getattr(redis_server, how)()
    eventually(lambda: one.finds(2) == [False] and two.finds(1) == [False], timeout_s=10.0)
    if how == "pause":
        redis_server.resume()
    else:
        redis_server.start()
    eventually(lambda: one.finds(2) == [True] and two.finds(1) == [True])


def test_a_redis_stalling_briefly_costs_nothing(
    servers: Servers, redis_server: RedisServer
) -> None:
    one, _ = servers.open([1], expiry_s=10.0), servers.open([2], expiry_s=10.0)
    servers.know_each_other()
    redis_server.pause()
    eventually(lambda: one.index.stats().trouble != "")
    assert one.finds(2) == [True]
    redis_server.resume()
    eventually(lambda: one.index.stats().trouble == "")
    assert one.finds(2) == [True]


def test_a_redis_restarted_empty_is_filled_again(
    servers: Servers, redis_server: RedisServer
) -> None:
    one, two = servers.open(range(1, 1000)), servers.open(range(2000, 3000))
    servers.know_each_other()
    redis_server.restart_empty()
    eventually(lambda: redis_server.client.scard(NAMES.servers) == 2)
    one.hold(range(1, 1100))
    eventually(lambda: two.finds(1099) == [True] and one.finds(2999) == [True])
    assert two.index.stats().num_mirrored_pages == 1099


def test_an_emptied_redis_is_filled_again(servers: Servers, redis_server: RedisServer) -> None:
    one, two = servers.open(range(1, 1000)), servers.open()
    servers.know_each_other()
    redis_server.client.flushall()
    eventually(lambda: bool(redis_server.client.exists(NAMES.record(one.index.server))))
    eventually(lambda: two.finds(1, 999) == [True, True])


def test_an_unconfirmed_change_is_applied_exactly_once(
    servers: Servers, redis_server: RedisServer
) -> None:
    one, two = servers.open(range(1, 100), expiry_s=30.0), servers.open(expiry_s=30.0)
    servers.know_each_other()
    publisher = one.index._connections[0]
    answer = publisher._answer
    lost = threading.Event()

    def fails_once() -> object:
        got = answer()
        if isinstance(got, bytes) and re.fullmatch(rb"\d+-0", got) and not lost.is_set():
            lost.set()
            raise OSError("the connection broke")
        return got

    publisher._answer = fails_once  # type: ignore[method-assign]
    one.hold(range(50, 150))
    assert lost.wait(20.0)
    eventually(lambda: two.finds(10, 99, 149) == [False, True, True])
    one.hold(range(60, 160))
    eventually(lambda: two.finds(50, 60, 159) == [False, True, True])
    assert two.index.stats().num_mirrored_pages == 100
    assert one.index.stats().num_snapshots_published == 1
    assert one.index.stats().num_published_anew == 0


def test_redis_out_of_memory_still_serves_reads(
    servers: Servers, redis_server: RedisServer
) -> None:
    one, two = servers.open(range(1, 100)), servers.open(range(500, 600))
    servers.know_each_other()
    redis_server.client.config_set("maxmemory", "1mb")
    one.hold(range(1, 200))
    eventually(lambda: "out of memory" in one.index.stats().trouble)
    later = time.monotonic() + 2 * EXPIRY_S
    eventually(lambda: time.monotonic() > later)
    assert two.finds(1, 199) == [True, False]
    assert one.finds(599) == [True]
    assert one.index.stats().connected
    redis_server.client.config_set("maxmemory", "0")
    eventually(lambda: two.finds(1, 199) == [True, True])
    eventually(lambda: one.index.stats().trouble == "")


def test_a_read_only_replica_serves_readers(servers: Servers, redis_server: RedisServer) -> None:
    one, two = servers.open([1], expiry_s=5.0), servers.open([2], expiry_s=5.0)
    servers.know_each_other()
    redis_server.client.config_set("replica-serve-stale-data", "yes")
    redis_server.client.replicaof("127.0.0.1", "1")  # nobody there: it keeps what it has
    eventually(lambda: one.index.stats().trouble == "it is a read-only replica")
    assert one.finds(2) == [True]
    redis_server.client.replicaof("NO", "ONE")
    eventually(lambda: one.index.stats().trouble == "")
    one.hold([1, 3])
    eventually(lambda: two.finds(1, 3) == [True, True])


@pytest.mark.parametrize(
    ("secret", "clause"),
    [
        ("", "it wants a password"),
        (f":{PASSWORD}@", "user or password is wrong"),
        (f"somebody:{PASSWORD}@", "user or password is wrong"),
        (f"reader:{PASSWORD}@", "may not"),
    ],
)
def test_a_refused_login_never_shows_the_password(
    secret: str, clause: str, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(password="another") as redis_server:
        redis_server.client.acl_setuser(
            "reader", enabled=True, passwords=[f"+{PASSWORD}"], commands=["+@read"], keys=["x"]
        )
        with caplog.at_level(logging.DEBUG), Servers(redis_server.url) as servers:
            url = f"redis://{secret}127.0.0.1:{redis_server.port}/0"
            one = servers.open([1], url=url)
            eventually(lambda: one.index.stats().num_errors >= 6)
            assert clause in one.index.stats().trouble
            assert one.finds(2) == [False]
            said = [record.getMessage() for record in caplog.records]
            assert len([line for line in said if "locality index" in line]) <= 2
            shown = "\n".join([*said, repr(one.index), repr(one.settings), caplog.text])
            shown += repr(one.index.stats()) + repr(one.index._connections)
            assert PASSWORD not in shown
            assert "Traceback" not in shown


def test_the_password_works_over_a_unix_socket() -> None:
    with (
        RedisServer(password=PASSWORD) as redis_server,
        Servers(redis_server.url) as servers,
    ):
        one = servers.open([1])
        two = servers.open([2], url=f"unix://:{PASSWORD}@{redis_server.socket_path}")
        servers.know_each_other()
        assert one.finds(2) == two.finds(1) == [True]


def test_tls_is_used_and_the_certificate_looked_at(tmp_path: Path) -> None:
    if not shutil.which("openssl"):
        pytest.skip("makes its certificate with openssl")
    certificate, secret = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", secret, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    port = free_port()
    with (
        RedisServer(
            *("--tls-port", str(port), "--tls-auth-clients", "no"),
            *("--tls-cert-file", certificate, "--tls-key-file", secret),
        ),
        Servers(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}") as servers,
    ):
        servers.open([1])
        two = servers.open([2])
        servers.know_each_other()
        assert two.finds(1) == [True]
        stranger = servers.open([3], url=f"rediss://127.0.0.1:{port}/0")
        eventually(lambda: stranger.index.stats().trouble == "its certificate is not trusted")


def test_a_server_that_is_not_redis_costs_misses(object_server: object) -> None:
    host, port = object_server.address  # type: ignore[attr-defined]
    with Servers(f"redis://{host}:{port}") as servers:
        one = servers.open([1])
        eventually(lambda: one.index.stats().num_errors >= 4)
        assert one.finds(2) == [False]


# ---- Rubbish ----


def _fill_with_garbage(redis_server: RedisServer, garbage: bytes, of: Server) -> None:
    client, server = redis_server.client, of.index.server
    forged = "e" * 32
    for name in (forged, "f" * 32, "not an id", ""):
        client.sadd(NAMES.servers, name)
    client.sadd(NAMES.servers, garbage)
    client.set(NAMES.record(forged), garbage)
    client.rpush(NAMES.record("f" * 32), garbage)
    client.zadd(NAMES.purges, {garbage: float("inf"), garbage + b"2": float("-inf")})
    client.xadd(NAMES.news, {garbage: garbage})
    client.xadd(NAMES.changes(server, 1), {garbage: garbage}, id="2-0")


@pytest.mark.parametrize("garbage", [b"", b"\0", b"\xff" * 300, b"SGLTPEER" * 50, b"x" * 100_000])
def test_garbage_in_every_key_is_ignored_and_counted(
    servers: Servers, redis_server: RedisServer, garbage: bytes
) -> None:
    one, two = servers.open([1]), servers.open([2])
    servers.know_each_other()
    _fill_with_garbage(redis_server, garbage, of=one)
    eventually(lambda: two.index.stats().num_garbage > 0)
    three = servers.open([3])
    eventually(lambda: three.finds(2) == [True] and two.finds(3) == [True])
    # The garbage stands where the next change of the first would: it publishes anew.
    one.hold([1, 10])
    eventually(lambda: two.finds(1, 10) == [True, True] and one.finds(2) == [True])
    assert one.purged == two.purged == []


@pytest.mark.parametrize("kind", ["record", "pages", "changes"])
def test_a_key_of_another_type_costs_nothing(
    servers: Servers, redis_server: RedisServer, kind: str
) -> None:
    one, two, three = servers.open([1]), servers.open([2]), servers.open([3])
    servers.know_each_other()
    server = one.index.server
    names = {
        "record": NAMES.record(server),
        "pages": NAMES.pages(server, 1),
        "changes": NAMES.changes(server, 1),
    }
    with redis_server.client.pipeline() as pipe:
        pipe.delete(names[kind]).hset(names[kind], "a", "b").pexpire(names[kind], 60_000).execute()
    one.hold([1, 10])
    late = servers.open()
    eventually(lambda: late.finds(2, 3) == two.finds(3, 3) == three.finds(2, 2) == [True, True])
    one.hold([1, 11])
    if kind != "pages":  # whoever has read it already does without
        eventually(lambda: late.finds(1, 11) == [True, True])
    eventually(lambda: two.finds(1, 11) == [True, True])


def test_an_answer_beyond_the_bound_is_not_read(
    servers: Servers, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = servers.open([1]), servers.open([2]), servers.open([3])
    servers.know_each_other()
    monkeypatch.setattr(connection, "MAX_REPLY_BYTES", 1 << 20)
    huge = b"x" * (3 << 20)
    redis_server.client.xadd(NAMES.changes(one.index.server, 1), {"d": huge}, id="2-0")
    redis_server.client.set("huge", huge, px=60_000)
    redis_server.client.rpush("many", *[b"x" * 10] * 100_000)
    own = connection.IndexConnection(parse_index_url(redis_server.url), 5.0)
    for command in (("GET", "huge"), ("LRANGE", "many", 0, -1)):
        with pytest.raises(connection.IndexFailure) as caught:
            own.exchange(command)
        assert caught.value.is_too_large
        assert own.exchange(("PING",)) == [b"PONG"]
    own.close()
    eventually(lambda: three.index.stats().num_garbage > 0 and two.index.stats().num_garbage > 0)
    two.hold([2, 20])
    eventually(lambda: three.finds(2, 20) == [True, True])
    eventually(lambda: two.finds(1) == [False])  # but for moments: its snapshot is read again
    one.hold([1, 10])  # finds its number taken, and publishes anew
    eventually(lambda: two.finds(1, 10) == [True, True])


def test_a_snapshot_lying_about_its_size_stays_bounded(
    servers: Servers, redis_server: RedisServer
) -> None:
    one, two = servers.open([1], max_pages=1000), servers.open([2])
    servers.know_each_other()
    forged = "e" * 32
    record = ServerRecord(NAMESPACE, forged, 1, 5, 5, (1 << 40) - 1, bytes(16), "tcp://h:1")
    redis_server.client.set(NAMES.record(forged), pack_record(record), px=60_000)
    redis_server.client.set(NAMES.pages(forged, 5), b"x" * 1_000_000, px=60_000)
    redis_server.client.sadd(NAMES.servers, forged)
    eventually(lambda: one.index.stats().num_garbage > 0)
    assert one.finds(2) == [True]
    assert one.index.stats().num_mirrored_pages == 1
    assert two.finds(1) == [True]


def test_a_forged_stream_is_read_ever_less_often(
    servers: Servers, redis_server: RedisServer
) -> None:
    one, two = servers.open([1]), servers.open([2])
    servers.know_each_other()
    stream = NAMES.changes(one.index.server, 1)
    empty = pack_delta(one.index.server, 900, Delta(*[one._pages[:0]] * 2))
    redis_server.client.xadd(stream, {"d": empty}, id="900-0")
    eventually(lambda: two.index.stats().num_snapshots_read >= 2)
    began = time.monotonic()
    eventually(lambda: time.monotonic() - began > 1.0)
    assert two.index.stats().num_snapshots_read < 8
    assert two.index.find([key(1)]) is not None


def test_more_servers_than_the_bound_leave_the_bound(
    servers: Servers, redis_server: RedisServer
) -> None:
    for number in range(200):
        name = f"{number:032x}"
        record = ServerRecord(NAMESPACE, name, 1, 1, 1, 0, bytes(16), "tcp://h:1")
        redis_server.client.set(NAMES.record(name), pack_record(record), px=60_000)
        redis_server.client.sadd(NAMES.servers, name)
    one = servers.open(max_peers=3)  # after them all, since it may look after any of them
    eventually(lambda: one.index.stats().num_peers > 0)
    assert one.index.stats().num_peers == 3


SERVING = Serving("http://192.0.2.1:30000", Role.AGGREGATED, 0)


def test_served_address_lives_as_long_as_the_record(
    servers: Servers, redis_server: RedisServer
) -> None:
    one, silent = servers.open([1]), servers.open([2])
    client, names = redis_server.client, NAMES.serves(one.index.server)
    one.index.announce_serving(SERVING)

    def told() -> Serving | None:
        return unpack_serving(client.get(names), one.index.server)

    eventually(lambda: told() == SERVING)
    one.index.announce_serving(SERVING._replace(role=Role.DECODE))
    eventually(lambda: told() == SERVING._replace(role=Role.DECODE))
    client.flushall()
    eventually(lambda: told() is not None)
    with client.pipeline() as both:  # in one step, or the server writes its own in between
        both.delete(names).rpush(names, "of another type").execute()
    eventually(lambda: client.type(names) == b"string")
    assert 0 < client.pttl(names) <= 1000 * EXPIRY_S
    assert client.exists(NAMES.serves(silent.index.server)) == 0
    other = bytes(32)
    one.index.set_namespace(other)
    eventually(lambda: client.exists(RedisKeys.of(other).serves(one.index.server)) == 1)
    assert client.exists(names) == 0
    one.close()
    assert client.exists(RedisKeys.of(other).serves(one.index.server)) == 0


def test_unusable_served_addresses_are_refused(servers: Servers) -> None:
    one = servers.open([1])
    with pytest.raises(ValueError, match="is not where a server answers"):
        one.index.announce_serving(SERVING._replace(url="tcp://192.0.2.1:1"))
