"""A real Envoy and its picker before three servers that fail: what clients see, who is asked."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from route_front import BIG, CHAT, Front
from route_mocks import Mocks

from kit.waiting import eventually
from server_process import free_port
from sglang_tiered.route.envoy import OWN_HEADERS, program_of
from sglang_tiered.route.settings import RouteConfig

pytest.importorskip("envoy")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def running(mocks: Mocks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with Front.before(mocks, tmp_path_factory.mktemp("front"), "--pick-timeout", "2s") as front:
        yield front


@pytest.fixture
def front(running: Front, mocks: Mocks) -> Front:
    return running.well(mocks)


@pytest.mark.parametrize("body", [None, b"", {"input_ids": [1, 2]}], ids=["GET", "POST", "chat"])
def test_the_pick_is_followed(front: Front, mocks: Mocks, body: Any) -> None:
    path = CHAT if body else "/v1/models"
    for wanted in mocks.all:
        front.prefer(mocks, wanted)
        before = front.metric('sglang_tiered_route_answers_total{as_picked="yes",status="')
        for answer in [front.ask(path, body) for _ in range(5)]:
            assert answer.headers["x-gateway-destination-endpoint-served"] == wanted.address
        after = front.metric('sglang_tiered_route_answers_total{as_picked="yes",status="')
        assert after - before == 5, "the picker hears who served"


@pytest.mark.parametrize("fails", ["503", "reset", "late", "dead"])
def test_failure_before_the_head_is_retried_elsewhere(
    front: Front, mocks: Mocks, fails: str
) -> None:
    front.prefer(mocks, mocks[0])
    mocks[0].fails = fails
    if fails == "dead":
        mocks.run(mocks[0].die())
    for _ in range(3):
        answer = front.chat()
        assert answer.status == 200 and answer.served_by != mocks[0].address
    assert mocks[0].num_seen == 3 * (fails != "dead"), "each was picked first, and once"


def test_death_with_the_head_is_retried_elsewhere(front: Front, mocks: Mocks) -> None:
    """Envoy has not passed it on yet, while the picker has seen it."""
    front.prefer(mocks, mocks[0])
    mocks[0].fails = "at-head"
    for answer in [front.chat() for _ in range(10)]:
        assert answer.is_whole == (answer.served_by != mocks[0].address)
        assert answer.status == 200


def test_death_mid_stream_breaks_the_stream(front: Front, mocks: Mocks) -> None:
    front.prefer(mocks, mocks[0])
    mocks[0].fails = "mid-stream"
    answer = front.chat()
    assert (answer.status, answer.is_whole) == (200, False)
    assert answer.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert sum(mock.num_seen for mock in mocks.all) == 1, "half an answer is not asked for again"


def test_clients_cannot_say_what_only_the_picker_may(front: Front, mocks: Mocks) -> None:
    front.prefer(mocks, mocks[2])
    told = dict.fromkeys(OWN_HEADERS, mocks[0].address)
    answer = front.ask(CHAT, {"input_ids": [1]}, told)
    assert (answer.status, answer.served_by) == (200, mocks[2].address)
    (seen,) = mocks[2].seen
    assert not {name for name in OWN_HEADERS if seen["headers"].get(name) == mocks[0].address}


def test_operators_calls_are_not_passed_on(front: Front, mocks: Mocks) -> None:
    for path in ("/tier/costs", "/flush_cache", "/server_info", "/v1/../tier/costs"):
        assert front.ask(path).status == 404


def test_draining_servers_get_no_request(front: Front, mocks: Mocks) -> None:
    front.prefer(mocks, mocks[0])
    mocks[0].is_draining = True
    eventually(lambda: sum(row["ready"] for row in front.servers()) == 2)
    assert mocks[0].address not in {front.chat().served_by for _ in range(5)}
    for mock in mocks.all:
        mock.is_draining = True
    eventually(lambda: not any(row["ready"] for row in front.servers()))
    answer = front.chat()
    assert answer.status == 503 and b"no server is ready" in answer.body


def test_servers_join_and_leave(front: Front, mocks: Mocks) -> None:
    more = Mocks([free_port()])
    try:
        front.follow([more[0].url])
        eventually(lambda: [row["url"] for row in front.servers()] == [more[0].url])
        eventually(lambda: front.chat().served_by == more[0].address, "Envoy reads the file")
    finally:
        front.follow([mock.url for mock in mocks.all])
        front.wait_until_ready(3)
        more.close()


def test_stopped_picker_is_waited_for_and_no_longer(front: Front, mocks: Mocks) -> None:
    pid = front.picker_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        assert front.ask(CHAT, BIG).status == 200
        assert time.monotonic() - started < 6.0
    finally:
        os.kill(pid, signal.SIGCONT)
    front.prefer(mocks, mocks[0])
    eventually(lambda: {front.chat().served_by for _ in range(5)} == {mocks[0].address})


def test_killed_picker_is_not_missed(front: Front, mocks: Mocks) -> None:
    pid, is_back = front.picker_pid(), threading.Event()

    def keep_asking(_: int) -> set[int]:
        statuses = set()
        while not is_back.is_set():
            statuses.add(front.chat().status)
        return statuses

    with ThreadPoolExecutor(4) as pool:
        asking = pool.map(keep_asking, range(4))
        try:
            os.kill(pid, signal.SIGKILL)
            told = {"x-gateway-destination-endpoint": f"127.0.0.1:{front.port + 2}"}
            assert front.chat(**told).status == 200, "without a picker no client picks either"
            front.wait_until_ready(3)
            assert front.picker_pid() != pid
        finally:
            is_back.set()
        assert set().union(*asking) == {200}


def test_sigterm_lets_answers_end(mocks: Mocks, tmp_path: Path) -> None:
    mocks.well()
    with Front.before(mocks, tmp_path) as front, front.connected() as kept:

        def is_told() -> bool:
            kept.request("GET", "/ready")
            answer = kept.getresponse()
            assert (answer.status, answer.read()) == (200, b"")
            return answer.getheader("connection") == "close"

        for mock in mocks:
            mock.fails = "hang"
        found = []
        asking = threading.Thread(target=lambda: found.append(front.chat()))
        asking.start()
        eventually(lambda: sum(mock.num_seen for mock in mocks.all) == 1)
        children = psutil.Process(front.process.pid).children()
        assert not is_told()
        front.process.terminate()
        eventually(is_told, "an answer says so")

        def is_closed() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", front.port)) != 0

        eventually(is_closed, "no new connection is taken")
        assert front.process.poll() is None, "it waits for the answer"
        mocks.well()
        asking.join(20)
        assert found and found[0].status == 200 and found[0].is_whole
        assert front.process.wait(20) == 0
        assert not [child for child in children if child.is_running()]


@pytest.mark.parametrize(("name", "usual"), [("", "300s"), ("_headers", "10s")])
def test_half_request_fills_no_memory(mocks: Mocks, tmp_path: Path, name: str, usual: str) -> None:
    """Without a key, of anybody who reaches the port. An answer may take longer. Here Envoy waits
    for a second."""
    mocks.well()
    program, waits = tmp_path / "envoy", f'"request{name}_timeout": '
    program.write_text(
        f'#!/bin/sh\nsed -i \'s/{waits}"{usual}"/{waits}"1s"/\' "$2"\n'
        f'exec {program_of(RouteConfig(servers="s"))} "$@"\n'
    )
    program.chmod(0o755)
    with Front.before(mocks, tmp_path, "--envoy-program", str(program)) as front:
        for mock in mocks:
            mock.fails = "hang"
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(front.chat)
            eventually(lambda: sum(mock.num_seen for mock in mocks) == 1)
            with socket.create_connection(("127.0.0.1", front.port), 20) as half:
                head = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n"
                half.sendall(head if name else head + b"\r\n1")
                assert half.recv(1000).startswith(b"HTTP/1.1 408")
            mocks.well()
            assert asking.result(20).status == 200
