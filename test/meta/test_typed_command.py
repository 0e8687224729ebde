"""What types the documents' command lines notices when they fail or leave something behind."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import typed_command
from typed_command import Desk, interrupt

from kit.waiting import eventually


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    model = tmp_path / "model"
    model.mkdir()
    return Desk.lay_out(tmp_path, model)


def test_a_command_that_fails_is_noticed(desk: Desk) -> None:
    assert desk.run("ls -d M scripts/serve") == "M\nscripts/serve\n"
    with pytest.raises(AssertionError, match="exit 3"):
        desk.run("exit 3")


def test_what_outlives_ctrl_c_is_noticed_and_ended(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell starts what runs in the background deaf to Ctrl-C."""
    monkeypatch.setattr(typed_command, "STOP_DEADLINE_S", 1.0)
    server = desk.start("setsid sleep 60 & wait", 0, tmp_path / "log")
    shell, children = psutil.Process(server.process.pid), list[psutil.Process]()

    def sleeps() -> bool:
        children[:] = [c for c in shell.children(recursive=True) if c.name() == "sleep"]
        return bool(children)

    eventually(sleeps)
    with pytest.raises(AssertionError, match=rf"left behind: \['{children[0].pid} sleep'\]"):
        interrupt(server)
    assert not psutil.wait_procs(children, timeout=30)[1]
