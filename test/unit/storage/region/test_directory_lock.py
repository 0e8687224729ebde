"""One holder at a time."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sglang_tiered.errors import StoreError, StoreLockedError
from sglang_tiered.storage.region import directory
from sglang_tiered.storage.region.directory import DirectoryLock
from sglang_tiered.storage.region.format import LOCK_NAME


def test_second_holder_is_told_who_has_it(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path) as lock:
        assert (tmp_path / LOCK_NAME).stat().st_mode & 0o777 == 0o600
        assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n"
        expected = f"in use by process {os.getpid()}; stop it or pass another --tier-dir"
        with pytest.raises(StoreLockedError, match=expected):
            DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


@pytest.mark.parametrize("is_removed", [False, True])
def test_waiting_takes_over_when_the_holder_leaves(tmp_path: Path, is_removed: bool) -> None:
    """Its last holder may remove it: who waited must not lock what nobody else can find."""
    first, naps = DirectoryLock(tmp_path), list[float]()

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            if is_removed:
                (tmp_path / LOCK_NAME).unlink()
            first.release()

    with DirectoryLock(tmp_path, timeout_s=60.0, sleep=nap) as second:
        assert second.is_held() and len(naps) == 3
        with pytest.raises(StoreLockedError):
            DirectoryLock(tmp_path)


def test_a_lock_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / LOCK_NAME).symlink_to(tmp_path / "target")
    with pytest.raises(StoreError, match="cannot be opened"):
        DirectoryLock(tmp_path)
    assert (tmp_path / "target").read_text() == "precious"
    with pytest.raises(StoreError, match=r"cannot be opened \(No such file"):
        DirectoryLock(tmp_path / "absent")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_no_lock_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(directory.os, "pwrite", refuse)
    with DirectoryLock(tmp_path) as lock:
        assert lock.is_held()
