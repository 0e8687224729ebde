"""Who holds a directory is told without touching its lock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_tiered.storage.region.directory import DirectoryLock
from sglang_tiered.storage.region.files import LOCK_NAME
from sglang_tiered.tools.store import target
from sglang_tiered.tools.store.target import Holder, find_holder


def test_the_holder_is_named_and_keeps_his_lock(tmp_path: Path) -> None:
    assert find_holder(tmp_path) == Holder(False, None)
    assert list(tmp_path.iterdir()) == []
    with DirectoryLock(tmp_path):
        assert find_holder(tmp_path) == Holder(True, os.getpid())
        assert str(find_holder(tmp_path)) == f"in use by process {os.getpid()}"
    assert find_holder(tmp_path) == Holder(False, os.getpid())
    assert str(find_holder(tmp_path)) == f"not in use, last by process {os.getpid()}"


def test_a_lock_on_another_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / LOCK_NAME).touch()
    with DirectoryLock(tmp_path / "other"):
        assert find_holder(tmp_path).held is False


@pytest.mark.parametrize("kind", ["fifo", "link", "directory"])
def test_what_is_no_lock_file_holds_nothing_up(tmp_path: Path, kind: str) -> None:
    path = tmp_path / LOCK_NAME
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "target")
    else:
        path.mkdir()
    assert find_holder(tmp_path) == Holder(False, None)


def test_a_system_without_lock_table_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOCK_NAME).write_text("4711\n")
    monkeypatch.setattr(target, "_LOCKS", tmp_path / "absent")
    found = find_holder(tmp_path)
    assert found == Holder(None, 4711)
    assert found.may_write
    assert str(found) == "perhaps in use, last by process 4711"


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"-1\n", b"12x\n"])
def test_a_lock_file_of_nonsense_names_nobody(tmp_path: Path, text: bytes) -> None:
    (tmp_path / LOCK_NAME).write_bytes(text)
    assert find_holder(tmp_path) == Holder(False, None)


def test_waiters_and_volumes_of_two_devices_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOCK_NAME).touch()
    inode = (tmp_path / LOCK_NAME).stat().st_ino
    locks = tmp_path / "locks"
    monkeypatch.setattr(target, "_LOCKS", locks)
    monkeypatch.setattr(target, "_filesystem_device", lambda _: (0, 0x2B))
    locks.write_text(f"1: -> FLOCK  ADVISORY  WRITE 7 00:2b:{inode} 0 EOF\n")
    assert find_holder(tmp_path).held is False
    locks.write_text(f"1: FLOCK  ADVISORY  WRITE 7 00:2c:{inode} 0 EOF\n")
    assert find_holder(tmp_path).held is False
    locks.write_text(f"1: FLOCK  ADVISORY  WRITE 7 00:2b:{inode} 0 EOF\n")
    assert find_holder(tmp_path) == Holder(True, 7)
