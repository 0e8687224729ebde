"""What types the documents' command lines notices when they fail or leave something behind."""

from __future__ import annotations

import http.server
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import typed_command
from typed_command import Desk, interrupt

from kit.serving import Quiet, serving


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    model = tmp_path / "model"
    model.mkdir()
    return Desk.lay_out(tmp_path, model)


class Posts(Quiet, http.server.SimpleHTTPRequestHandler):
    """Answers 501 to a POST."""


@pytest.fixture
def url() -> Iterator[str]:
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Posts)) as url:
        yield url


def test_a_command_that_fails_is_noticed(desk: Desk) -> None:
    assert desk.run("ls -d M scripts/serve") == "M\nscripts/serve\n"
    with pytest.raises(AssertionError, match="exit 3"):
        desk.run("exit 3")


def test_curl_answered_with_an_error_fails(desk: Desk, url: str) -> None:
    assert desk.run(f"curl -s {url}/")
    with pytest.raises(AssertionError, match="exit 22"):
        desk.run(f"curl -s {url}/ -d x")


@pytest.mark.parametrize("left", ["sleep 60 & wait", "setsid sleep 60 & wait"])
def test_what_outlives_ctrl_c_is_noticed_and_ended(
    left: str, desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell starts what runs in the background deaf to Ctrl-C."""
    monkeypatch.setattr(typed_command, "STOP_DEADLINE_S", 1.0)
    server = desk.start(left, 0, tmp_path / "log")
    shell = psutil.Process(server.process.pid)
    deadline = time.monotonic() + 30.0
    while not (children := [c for c in shell.children(recursive=True) if c.name() == "sleep"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(AssertionError, match=rf"left behind: \['{children[0].pid} sleep'\]"):
        interrupt(server)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


def test_what_ctrl_c_ends_is_no_failure(desk: Desk, tmp_path: Path) -> None:
    server = desk.start("sleep 60", 0, tmp_path / "log")
    interrupt(server)
    assert server.process.returncode != 0
