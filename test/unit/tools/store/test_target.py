"""Who holds a directory is told without touching its lock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_tiered.storage.region.directory import DirectoryLock
from sglang_tiered.storage.region.files import LOCK_NAME
from sglang_tiered.tools.store.target import Holder, find_holder


def test_the_holder_is_named_and_keeps_his_lock(tmp_path: Path) -> None:
    assert find_holder(tmp_path) == Holder(False, None)
    assert list(tmp_path.iterdir()) == []
    with DirectoryLock(tmp_path):
        assert find_holder(tmp_path) == Holder(True, os.getpid())
        assert str(find_holder(tmp_path)) == f"in use by process {os.getpid()}"
    assert find_holder(tmp_path) == Holder(False, os.getpid())
    assert str(find_holder(tmp_path)) == f"not in use, last by process {os.getpid()}"


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
