"""HAProxy with the files of ``deploy/haproxy`` before three servers asks the picker over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from route_front import CHAT, Answer, Front
from route_mocks import Mocks

from kit.waiting import eventually
from server_process import free_port

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).resolve().parents[2]
CLASSES = "default: soon\nclasses:\n  soon: {ttft: 2s, priority: 7}\n"


@pytest.fixture(scope="module")
def program() -> str:
    found = subprocess.run(
        [ROOT / "scripts/haproxy"], capture_output=True, text=True, check=False, timeout=200
    )
    if found.returncode:
        pytest.skip(found.stderr.strip())
    return found.stdout.strip()


@dataclass
class Haproxy:
    """``front`` is the picker alone."""

    front: Front
    port: int

    def ask(self, headers: Mapping[str, str] | None = None) -> Answer:
        return self.front.ask(CHAT, {"input_ids": [1, 2], "stream": True}, headers, self.port)


@pytest.fixture(scope="module")
def running(
    program: str, mocks: Mocks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Haproxy]:
    folder, port = tmp_path_factory.mktemp("haproxy"), free_port()
    (folder / "classes.yaml").write_text(CLASSES)
    text = (ROOT / "deploy/haproxy/haproxy.cfg").read_text()
    text = text.replace("pick.lua", str(ROOT / "deploy/haproxy/pick.lua"), 1)
    text = text.replace("0.0.0.0:30000", f"127.0.0.1:{port}")
    (at, *_) = re.findall(r"(?m)^    server 192.*$", text)
    text = text.replace(at, "".join(f"    server {m.address} {m.address}\n" for m in mocks.all))
    text = re.sub(r"(?m)^    server 192.*$", "", text)
    (folder / "haproxy.cfg").write_text(text)
    flags = "--envoy", "off", "--classes", str(folder / "classes.yaml")
    with Front.before(mocks, folder, *flags) as front, (folder / "log").open("wb") as log:
        environment = os.environ | {"PICKER": f"127.0.0.1:{front.port + 2}"}
        command = [program, "-db", "-f", str(folder / "haproxy.cfg")]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            yield Haproxy(front, port)
        finally:
            process.kill()
            process.wait(20)


@pytest.fixture
def haproxy(running: Haproxy, mocks: Mocks) -> Haproxy:
    running.front.well(mocks)

    def is_well() -> bool:
        """By its own health checks, of servers and of the picker."""
        mocks.well()
        answered = set()
        with contextlib.suppress(OSError):  # until it listens
            answered = {running.ask().served_by for _ in range(6)}
        told = [one["headers"] for mock in mocks.all for one in mock.seen]
        return len(answered) == 3 and all("x-override-priority" in one for one in told)

    eventually(is_well, "HAProxy")
    mocks.well()
    return running


def test_the_pick_is_followed_with_its_headers(haproxy: Haproxy, mocks: Mocks) -> None:
    for wanted in mocks.all:
        haproxy.front.prefer(mocks, wanted)
        wanted.seen.clear()
        sent = {"x-override-priority": "99", "x-override-rid": "mine"}
        for answer in [haproxy.ask(sent) for _ in range(3)]:
            assert (answer.status, answer.served_by) == (200, wanted.address)
        told = [one["headers"] for one in wanted.seen]
        assert [one["x-override-priority"] for one in told] == ["7"] * 3, "the class's"
        assert not any("x-override-rid" in one for one in told)


@pytest.mark.parametrize("fails", ["503", "reset"])
def test_failed_server_is_followed_by_another(haproxy: Haproxy, mocks: Mocks, fails: str) -> None:
    haproxy.front.busy(mocks, mocks.all[1:], 1.0)
    mocks[0].fails = fails
    answer = haproxy.ask()
    assert answer.status == 200 and answer.served_by != mocks[0].address
    assert mocks[0].num_seen, "it was picked first"


def test_refusal_reaches_the_client_whole(haproxy: Haproxy, mocks: Mocks) -> None:
    haproxy.front.busy(mocks, mocks)
    answer = haproxy.ask()
    assert answer.status == 429 and int(answer.headers["retry-after"]) > 0
    assert json.loads(answer.body)["error"]["code"] == 429
    assert not any(mock.num_seen for mock in mocks.all)


def test_operators_calls_are_not_passed_on(haproxy: Haproxy) -> None:
    assert haproxy.front.ask("/tier/costs", port=haproxy.port).status == 404


def test_without_a_picker_the_least_busy_answers(haproxy: Haproxy) -> None:
    """Last: it ends the picker."""
    haproxy.front.close()

    def is_quick() -> bool:
        began = time.monotonic()
        return haproxy.ask().status == 200 and time.monotonic() - began < 0.5

    eventually(is_quick, "the dead picker is no longer asked", timeout_s=10)
