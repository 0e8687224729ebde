"""Filesystems that do not offer every call."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from kit.runs import make_run
from kit.tiers import open_region, store
from kit.waiting import TIMEOUT_S
from sglang_tiered.errors import StoreError
from sglang_tiered.storage.filesystem import read_small_file, replace_file
from sglang_tiered.storage.region.directory import DirectoryState, prepare


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_tiers_work_without_syncs_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """SMB, 9p and drvfs answer EINVAL. Any other error is one."""
    real, works = os.fsync, code != errno.EIO

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    engine = open_region(tmp_path / "shard")
    store(engine, make_run(1, [5000] * 3))
    for _ in range(2):
        assert engine.flush(TIMEOUT_S) is works
    engine.close()
    assert caplog.text.count("cannot make names durable") == works
    if works:
        assert prepare(tmp_path / "tier") is DirectoryState.ABSENT
    else:
        with pytest.raises(StoreError, match="is not writable"):
            prepare(tmp_path / "tier")


def test_a_file_is_replaced_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, temporary = tmp_path / "file", tmp_path / "file.tmp"
    temporary.write_bytes(b"of a writer that died")
    temporary.chmod(0o666)
    replace_file(file, b"whole", temporary)

    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output"):
        replace_file(file, b"half", temporary)
    assert (file.read_bytes(), list(tmp_path.iterdir())) == (b"whole", [file])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_sparse_terabyte_does_not_take_all_memory(tmp_path: Path) -> None:
    path = tmp_path / "CHECKPOINT"
    path.touch()
    os.truncate(path, 1 << 40)
    assert len(read_small_file(path)) <= 1 << 30
