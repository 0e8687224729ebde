"""Prefill and decode servers behind a front: requests go to pairs, by Envoy's mirroring."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from route_front import BIG, CHAT, Front
from route_mocks import Mock, Mocks

from kit.waiting import eventually
from server_process import free_port

pytest.importorskip("envoy")
pytestmark = pytest.mark.timeout(120)

ROOM = "x-override-bootstrap-room"
SERVED = "x-gateway-destination-endpoint-served"


def assign(mocks: Mocks) -> None:
    """All work, by halves; without a moment in which one does both."""
    for mock in mocks.all:
        mock.fails, mock.is_draining = "", False
        is_prefill = mock in mocks.all[:2]
        role = "prefill" if is_prefill else "decode"
        mock.costs = {"role": role, "bootstrap_port": 8998 if is_prefill else None}
        mocks.release(mock)


@pytest.fixture(scope="module")
def mocks() -> Iterator[Mocks]:
    made = Mocks([free_port() for _ in range(4)])
    assign(made)
    yield made
    made.close()


@pytest.fixture(scope="module")
def running(mocks: Mocks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with Front.before(mocks, tmp_path_factory.mktemp("front"), "--pick-timeout", "2s") as front:
        yield front


@pytest.fixture
def front(running: Front, mocks: Mocks) -> Front:
    assign(mocks)
    running.wait_until_ready(4)
    for mock in mocks.all:  # of what was asked to see whether it is ready
        mock.seen.clear()
    return running


def asked(mocks: list[Mock]) -> list[tuple[Mock, str, int]]:
    """Who was asked, in which room, with how many bytes."""
    return [
        (mock, one["headers"].get(ROOM, ""), one["length"]) for mock in mocks for one in mock.seen
    ]


def test_both_of_a_pair_get_the_request(front: Front, mocks: Mocks) -> None:
    answer = front.ask(CHAT, BIG)
    ((decode, room, length),) = asked(mocks.all[2:])
    assert (answer.status, answer.served_by, length) == (200, decode.address, len(BIG))
    eventually(lambda: len(asked(mocks.all[:2])) == 1, "the mirror")
    assert [one[1:] for one in asked(mocks.all[:2])] == [(room, len(BIG))] and int(room)
    told = decode.seen[0]["headers"]
    (prefill,) = [mock for mock in mocks.all[:2] if mock.seen]
    assert told["x-prefiller-host-port"] == prefill.address
    assert told["x-override-bootstrap-host"] == "127.0.0.1"
    assert told["x-override-bootstrap-port"] == "8998"


@pytest.mark.parametrize("fails", ["503", "reset"])
def test_failed_decode_gets_a_new_pair(front: Front, mocks: Mocks, fails: str) -> None:
    mocks[2].fails = fails
    for _ in range(4):
        answer = front.chat()
        assert (answer.status, answer.served_by) == (200, mocks[3].address)
    eventually(lambda: len(asked(mocks.all[:2])) == len(asked(mocks.all[2:])), "the mirrors")
    rooms = [room for _, room, _ in asked(mocks.all[2:])]
    assert len(rooms) > 4 or not mocks[2].num_seen
    assert len(set(rooms)) == len(rooms), "no room is used twice"
    assert sorted(rooms) == sorted(room for _, room, _ in asked(mocks.all[:2]))


@pytest.mark.parametrize("how", ["503", "reset", "left", ""])
def test_prefill_hears_that_nobody_will_ask(front: Front, mocks: Mocks, how: str) -> None:
    """Nobody ends a mirrored request: it would wait for a minute."""
    for mock in mocks.all[2:]:
        mock.fails = "hang" if how == "left" else how
    if how == "left":
        with front.connected() as client:
            client.request("POST", CHAT, b'{"input_ids": [1, 2]}')
            eventually(lambda: asked(mocks.all[:2]) and asked(mocks.all[2:]), "both have it")
    else:
        assert front.chat().status == (503 if how else 200)
    eventually(lambda: len(asked(mocks.all[:2])) == len(asked(mocks.all[2:])), "the mirrors")
    for mock in mocks.all[:2]:
        rooms, told = {room for _, room, _ in asked([mock])}, len(mock.asked)
        eventually(lambda mock=mock, told=told: len(mock.asked) > told + 2)
        assert rooms & mock.abandoned == (rooms if how else set())


def test_pairs_are_refused_without_a_picker(front: Front) -> None:
    """Envoy cannot name one by itself, and says so at once."""
    pid = front.picker_pid()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: front.chat().status == 503, "it is gone")
    eventually(lambda: front.chat().status == 200, "it is back")
    assert front.picker_pid() != pid
