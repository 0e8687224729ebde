"""Prefill servers are asked for off the scheduler's thread, whatever they answer."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver
from sglang.srt.disaggregation.decode import DecodePreallocQueue

from kit.serving import Quiet, serving
from kit.waiting import eventually
from sglang_tiered.config import TransferConfig
from sglang_tiered.errors import TransferError
from sglang_tiered.integration.disaggregation import bootstrap_client
from sglang_tiered.integration.disaggregation.bootstrap_client import BootstrapClient
from sglang_tiered.integration.disaggregation.manager import DecodeKVManager
from sglang_tiered.integration.hooks import _after_decode_queue

pytestmark = pytest.mark.timeout(60)

RANK = ("192.0.2.7", 4321)


@pytest.fixture
def manager() -> Any:
    """A decode rank's manager without the endpoint that its constructor makes."""
    made: Any = DecodeKVManager.__new__(DecodeKVManager)
    made.prefill_info_table = {}
    made.kv_args = SimpleNamespace(page_size=64, engine_rank=0, state_types=[])
    made.kv_cache_dtype_str = "auto"
    made.kv_layout = made.dsv41_spec_layout = None
    made.attn_tp_size = made.attn_cp_size = made.pp_size = made.dcp_size = 1
    made.attn_tp_rank = made.attn_cp_rank = made.pp_rank = 0
    made.is_mla_backend = made.is_hybrid_mla_backend = False
    made.enable_all_cp_ranks_for_transfer = False
    made.connection_lock, made.connection_pool = threading.Lock(), {}
    made.bootstrap_client = BootstrapClient(made, made.check_is_allowed)
    made._transfer = TransferConfig()
    return made


def failure_of(manager: Any, server: str) -> str | None:
    return manager.bootstrap_client.lookup_failure(server)


def refusal(manager: Any, server: str) -> str:
    """Why a server cannot be used, once that is known."""
    assert not manager.bootstrap_client.ensure_known(server)
    eventually(lambda: failure_of(manager, server) is not None)
    assert server not in manager.prefill_info_table
    return failure_of(manager, server) or ""


def test_other_page_size_fails_without_raising(manager: Any) -> None:
    """In SGLang it ends the decode scheduler."""
    told: list[Any] = []
    with bootstrap_that_says({**GOOD_INFO, "page_size": 16}, GOOD_ROW) as server:
        manager.bootstrap_client.call_with_ranks(server, told.append)
        assert "page_size=16" in refusal(manager, server)
        eventually(lambda: told == [[]])


def test_callbacks_that_wait_for_lookups_are_bounded(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients name a slow server in one request after the other, and end them."""
    monkeypatch.setattr(bootstrap_client, "MAX_WAITING", 2)
    client, told = manager.bootstrap_client, []
    for _ in range(2):
        client._running["slow:1"] = lookup = Future()
        for _ in range(3):
            client.call_with_ranks("slow:1", told.append)
        lookup.set_result([])
    assert told == [[]] * 4


def test_remote_server_is_asked_only_if_allowed(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client names it: whoever runs it would decide what decode takes for KV."""
    asked: list[str] = []
    monkeypatch.setattr(
        CommonKVManager, "try_ensure_parallel_info", lambda _, server: asked.append(server)
    )
    for server in ("192.0.2.7:9", "[2001:db8::1]:9"):
        assert "--transfer-allow" in refusal(manager, server)
    assert not asked
    manager._transfer = TransferConfig(allowed_networks=("192.0.2.0/24",))
    manager.bootstrap_client = BootstrapClient(manager, manager.check_is_allowed)
    assert not manager.bootstrap_client.ensure_known("192.0.2.7:9")
    eventually(lambda: bool(asked))


@pytest.mark.parametrize("networks", [(), ("192.0.2.0/24",)])
def test_allowed_networks_apply_with_keys(
    manager: Any, tmp_path: Path, networks: tuple[str, ...]
) -> None:
    manager._transfer = TransferConfig(keys_directory=str(tmp_path), allowed_networks=networks)
    manager.check_is_allowed("192.0.2.7")
    manager.check_is_allowed("127.0.0.1")
    refused = pytest.raises(TransferError, match="--transfer-allow")
    with refused if networks else nullcontext():
        manager.check_is_allowed("203.0.113.1")


GOOD_ROW = {"rank_ip": RANK[0], "rank_port": RANK[1]}
GOOD_INFO = {
    **dict.fromkeys(("attn_tp_size", "attn_cp_size", "dp_size", "pp_size"), 1),
    "page_size": 64,
    "kv_cache_dtype": "auto",
    "follow_bootstrap_room": True,
}


@contextmanager
def bootstrap_that_says(info: Any, row: Any, dp_ranks: Any = None) -> Iterator[str]:
    """A server that a client may run, and name in its request."""

    class Handler(Quiet):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked = parse_qs(urlsplit(self.path).query)
            of_rank = row() if callable(row) else row
            said = info if asked["prefill_dp_rank"] == ["-1"] else of_rank
            self.answer(200, json.dumps(said).encode())

        def do_POST(self) -> None:
            self.answer(200, json.dumps(dp_ranks).encode())

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url.removeprefix("http://")


@pytest.mark.parametrize(
    "row",
    [
        {"rank_port": 1},
        {"rank_ip": "127.0.0.1"},
        {"rank_ip": 2130706433, "rank_port": 1},  # 127.0.0.1 as a number
        {"rank_ip": "", "rank_port": 1},
        {"rank_ip": "127.0.0.1\n", "rank_port": 1},
        {"rank_ip": "x" * 256, "rank_port": 1},
        *({"rank_ip": "127.0.0.1", "rank_port": port} for port in ("x", "1", 0, -1, 65536, 1.5)),
        [],
        None,
    ],
    ids=repr,
)
def test_rank_without_address_harms_only_its_server(row: Any, manager: Any) -> None:
    """It ended the scheduler, and kept every later loss from being noticed."""
    client = manager.bootstrap_client
    with bootstrap_that_says(GOOD_INFO, row) as server:
        assert f"the server at {server} cannot be used" in refusal(manager, server)
    with bootstrap_that_says(GOOD_INFO, GOOD_ROW) as good:
        eventually(lambda: client.ensure_known(good))
    assert client.drop_servers_at((RANK[0], 1)) == []
    assert client.drop_servers_at(RANK) == [good]
    assert client.rank_address(good, (0, 0, 0, 0)) is None


def test_slow_answers_for_many_ranks_time_out(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It held a thread for hours: each answer came in time."""
    monkeypatch.setattr(bootstrap_client, "LOOKUP_DEADLINE_S", 0.3)
    pause = threading.Event()
    slow_row: Any = lambda: (pause.wait(0.02), GOOD_ROW)[1]  # noqa: E731
    with bootstrap_that_says({**GOOD_INFO, "dp_size": 4096}, slow_row) as server:
        assert "did not answer within" in refusal(manager, server)


@pytest.mark.parametrize("number", [0, -1, 10**9, 10**300])
@pytest.mark.parametrize("kind", ["attn_tp_size", "attn_cp_size", "dp_size", "pp_size"])
def test_server_with_invalid_rank_counts_is_refused(kind: str, number: int, manager: Any) -> None:
    """Lists of them took all memory; none at all ended the scheduler."""
    with bootstrap_that_says({**GOOD_INFO, kind: number}, GOOD_ROW) as server:
        assert "no ranks, or more than" in refusal(manager, server)


def test_silent_machine_leaves_threads_to_others(manager: Any) -> None:
    """A client names as many silent ports as it likes, and by any name of the machine."""
    hosts = ("127.0.0.1", "127.0.0.2", "localhost", "[::ffff:127.0.0.1]", "127.0.0.3")
    with ExitStack() as silent:
        servers = []
        for host in hosts:
            port = silent.enter_context(socket.create_server(("0.0.0.0", 0))).getsockname()[1]
            servers.append(f"{host}:{port}")
        assert len(servers) > bootstrap_client.MAX_LOOKUPS_PER_MACHINE
        assert bootstrap_client.MAX_LOOKUPS > bootstrap_client.MAX_LOOKUPS_PER_MACHINE
        for server in servers:
            assert not manager.bootstrap_client.ensure_known(server)
        eventually(lambda: any(failure_of(manager, server) for server in servers))
        (why,) = filter(None, [failure_of(manager, server) for server in servers])
        assert "its machine has not answered other questions" in why
    eventually(lambda: all(failure_of(manager, server) for server in servers))
    assert not manager.bootstrap_client._asked


def test_servers_named_without_end_are_not_queued(manager: Any) -> None:
    """What waited to be looked up grew with them."""
    answer, client = threading.Event(), manager.bootstrap_client
    client._check_is_allowed = lambda _: answer.wait(20)
    servers = [f"127.0.0.1:{port}" for port in range(1, 1001)]
    for server in servers:
        assert not client.ensure_known(server)
    assert len(client._running) == bootstrap_client.MAX_LOOKUPS
    answer.set()
    asked_again = servers[-1]
    eventually(lambda: client.ensure_known(asked_again) or failure_of(manager, asked_again))


def test_least_recently_used_server_is_forgotten(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client names as many as it likes."""
    monkeypatch.setattr(bootstrap_client, "MAX_SERVERS", 2)
    client = manager.bootstrap_client
    with ExitStack() as stack:
        servers = [stack.enter_context(bootstrap_that_says(GOOD_INFO, GOOD_ROW)) for _ in range(3)]
        before = len(os.listdir("/proc/self/fd"))
        for server in servers:
            eventually(lambda server=server: client.ensure_known(server))
            manager.connection_pool[f"{server}_0"] = []
            client.ensure_known(servers[0])
        assert set(manager.prefill_info_table) == {servers[0], servers[2]}
        assert set(manager.connection_pool) == {f"{servers[0]}_0", f"{servers[2]}_0"}
        assert client.rank_address(servers[1], (0, 0, 0, 0)) is None
        eventually(lambda: client.ensure_known(servers[1]))  # asked again
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    for port in (1, 2, 3):
        assert not client.ensure_known(f"127.0.0.1:{port}")
    eventually(lambda: not client._running)
    assert len(client._failures) == 2


@pytest.mark.parametrize(
    ("said", "understood"), [({"7": 1}, 1), ({"7": "x"}, -1), ([1], -1), (None, -1)]
)
def test_non_numeric_replica_does_not_reach_the_scheduler(
    said: Any, understood: int, manager: Any
) -> None:
    """SGLang makes numbers of them there, and ends on what is none."""
    with bootstrap_that_says(GOOD_INFO, GOOD_ROW, said) as server:
        eventually(lambda: manager.bootstrap_client.replicas_of(server, [7]) == {"7": understood})


def test_silent_replica_query_fails_without_blocking(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang waited for it on the scheduler's thread, five seconds a step; a room of no replica was
    pending for ever."""
    monkeypatch.setattr(bootstrap_client, "LOOKUP_DEADLINE_S", 0.5)
    replicas_of = manager.bootstrap_client.replicas_of
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = f"127.0.0.1:{silent.getsockname()[1]}"
        for _ in range(3):  # each returns, though the question is still open
            assert replicas_of(server, [7]) == {}
        eventually(lambda: replicas_of(server, [7]) == {"7": -1})
    with bootstrap_that_says(GOOD_INFO, GOOD_ROW, {"8": 1}) as server:
        eventually(lambda: replicas_of(server, [7, 8]) == {"7": -1, "8": 1})


def test_request_waits_seconds_for_its_server(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang counts its scheduler's steps, of which one may take a second."""
    monkeypatch.setattr(CommonKVReceiver, "query_prefill_dp_ranks", None)  # put back afterwards
    queue: Any = DecodePreallocQueue.__new__(DecodePreallocQueue)
    queue.transfer_backend, queue.kv_manager = SimpleNamespace(value="zmq"), manager
    queue.scheduler = SimpleNamespace(forward_stream=None)
    queue._ensure_retry_count, queue._ensure_last_attempt_time = {}, {}
    _after_decode_queue(None, queue)
    now = time.monotonic()
    monkeypatch.setattr(bootstrap_client, "time", SimpleNamespace(monotonic=lambda: now))
    failed: dict[int, str] = {}
    manager.room_failed = failed.__setitem__
    end = SimpleNamespace(bootstrap_room=7, looked_at=None, waited_s=0.0)
    asked = [SimpleNamespace(kv_receiver=end)]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = f"127.0.0.1:{silent.getsockname()[1]}"
        for step_s in (0.0, 60.0, 0.9, 0.9, 0.9, 0.9):  # a long step is one
            now += step_s
            assert queue._ensure_prefill_info({server: asked}) == ({}, asked)
        now += 0.9
        assert queue._ensure_prefill_info({server: asked}) == ({}, [])
    assert f"the server at {server} has not answered" in failed[7]


def test_waiting_callback_gets_the_ranks(manager: Any) -> None:
    """A request given up before its prefill server was known would be waited for there."""
    told: list[Any] = []
    with bootstrap_that_says(GOOD_INFO, GOOD_ROW) as server:
        manager.bootstrap_client.call_with_ranks(server, told.append)
        eventually(lambda: bool(told))
        manager.bootstrap_client.call_with_ranks(server, told.append)  # known by now: at once
    assert told == [[RANK], [RANK]]
