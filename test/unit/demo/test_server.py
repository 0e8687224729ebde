"""What the demo's server is started with, and a start that fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sglang_tiered.demo.server import (
    DEMO_FLAGS,
    NotServingError,
    ServerProcess,
    demo_command,
    free_port,
)
from sglang_tiered.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def flag_values(command: list[str]) -> Iterator[tuple[str, str]]:
    return zip(command, command[1:], strict=False)


def test_given_flags_win_over_the_demos(cache: Path) -> None:
    command = demo_command(["--dtype=bfloat16", "--max-total-tokens", "4096"])
    assert "--dtype" not in command
    assert command.count("--max-total-tokens") == 1
    assert ("--served-model-name", DEMO_FLAGS["--served-model-name"]) in flag_values(command)


def test_the_demo_model_is_made_once(cache: Path) -> None:
    (first,) = [
        Path(value) for flag, value in flag_values(demo_command([])) if flag == "--model-path"
    ]
    made = (first / "model.safetensors").stat()
    assert first.parent == cache / "sglang-tiered"
    demo_command([])
    again = (first / "model.safetensors").stat()
    assert (again.st_ino, again.st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_a_cache_nobody_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        demo_command([])


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no memory left'); raise SystemExit(3)"]
    log = tmp_path / "log"
    process = ServerProcess.open_process(command, os.environ, log)
    server = ServerProcess(free_port(), process, log)
    with pytest.raises(NotServingError, match="(?s)ended at start.*no memory left"):
        server.wait_until_it_serves(60)
    server.kill()  # of what is gone already
