"""Filesystems that do not offer every call, and those that are memory."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kit.waiting import finished
from sglang_tiered.storage.base import Reason
from sglang_tiered.storage.bucket.directory import Directory
from sglang_tiered.storage.filesystem import filesystem_type, replace_file
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.directory import DirectoryState, prepare

if TYPE_CHECKING:
    from kit.runs import MakeRun

TIMEOUT_S = 20.0
REGION = 64 * 1024


@pytest.fixture(params=[errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def refused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """As if directories could not be synced; returns the error."""
    real, code = os.fsync, int(request.param)

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return code


def open_engine(directory: Path) -> RegionEngine:
    return RegionEngine(
        directory, namespace=b"\x11" * 32, capacity_bytes=4 * REGION, region_bytes=REGION
    )


def test_a_store_works_without_syncs_of_names(
    tmp_path: Path, refused: int, make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    """SMB, 9p and drvfs answer EINVAL. Any other error is one."""
    works = refused != errno.EIO
    with caplog.at_level(logging.WARNING):
        engine = open_engine(tmp_path)
        try:
            assert set(finished(engine.submit_store(make_run(1, [5000] * 3)))) == {Reason.OK}
            for _ in range(2):
                assert engine.flush(TIMEOUT_S) is works
        finally:
            engine.close()
    assert caplog.text.count("cannot make names durable") == works


def test_a_tier_directory_is_prepared_without_syncs(tmp_path: Path, refused: int) -> None:
    if refused == errno.EIO:
        with pytest.raises(Exception, match="is not writable"):
            prepare(tmp_path)
        return
    assert prepare(tmp_path) is DirectoryState.EMPTY
    assert prepare(tmp_path) is DirectoryState.OURS


def test_a_bucket_directory_works_without_syncs(
    tmp_path: Path, refused: int, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Directory(tmp_path)
    for name in ("one", "two"):
        if refused == errno.EIO:
            with pytest.raises(OSError, match="Input/output"):
                directory.write(f"a/b/{name}", b"x")
        else:
            directory.write(f"a/b/{name}", b"x")
    assert caplog.text.count("cannot make names durable") == (refused != errno.EIO)


def test_a_filesystem_without_modes_takes_files(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchmod", refuse)
    assert prepare(tmp_path) is DirectoryState.EMPTY
    engine = open_engine(tmp_path / "shard-x")
    try:
        assert set(finished(engine.submit_store(make_run(1, [5000] * 3)))) == {Reason.OK}
    finally:
        engine.close()


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


def test_mounts_tell_what_is_memory(tmp_path: Path) -> None:
    assert filesystem_type(Path("/proc")) == "proc"
    assert filesystem_type(tmp_path) != "proc"
    with pytest.raises(FileNotFoundError):
        filesystem_type(tmp_path / "absent")
