"""The file of ``--tier-log-requests`` is its owner's alone, and no other kind of file."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_tiered.errors import ConfigError
from sglang_tiered.request_log import RequestLogConfig, open_log


def test_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    RequestLogConfig(path=str(path)).check()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    os.close(open_log(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("make", "name", "why"),
    [
        (lambda path: path.mkdir(), "log", "Is a directory"),
        (lambda path: path.symlink_to(path.parent / "elsewhere"), "log", "it is a symbolic link"),
        (os.mkfifo, "log", "it is no ordinary file"),
    ],
)
def test_what_is_no_file_is_refused(
    tmp_path: Path, make: Callable[[Path], None], name: str, why: str
) -> None:
    path = tmp_path / name
    make(path)
    with pytest.raises(ConfigError, match=rf"--tier-log-requests {path} .*{why}.*; name a file"):
        RequestLogConfig(path=str(path)).check()
    assert not (tmp_path / "elsewhere").exists()


def test_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's server could write to it, and its owner could read what is written."""
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="it belongs to another user"):
        RequestLogConfig(path=str(path)).check()


def test_replicas_share_no_file(tmp_path: Path) -> None:
    config = RequestLogConfig(path=str(tmp_path / "log"), num_replicas=2)
    assert [config.file_of(number).name for number in range(2)] == ["log.replica0", "log.replica1"]


def test_file_that_cannot_be_renamed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its size every line would be lost."""
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)  # root may write anywhere
    with pytest.raises(ConfigError, match="its directory does not let it be renamed"):
        RequestLogConfig(path=str(tmp_path / "requests.jsonl")).check()
