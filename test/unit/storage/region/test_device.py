"""FileDevice on real files, direct where the filesystem allows it and buffered."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from sglang_tiered.storage.region import device as device_module
from sglang_tiered.storage.region.device import FileDevice, aligned_buffer

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 1 << 20


@pytest.fixture(params=[None, False], ids=["probed", "buffered"])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> FileDevice:
    return FileDevice(tmp_path, direct=request.param)


def views(data: bytearray, cuts: list[int]) -> list[memoryview]:
    edges = [0, *cuts, len(data)]
    view = memoryview(data)
    return [view[start:stop] for start, stop in zip(edges[:-1], edges[1:], strict=True)]


@pytest.mark.parametrize("cuts", [[], [4096], [1], [3, 3, 8000], [4096, 4097, 12_000]])
def test_any_segmentation_round_trips(device: FileDevice, cuts: list[int]) -> None:
    data = bytearray(os.urandom(16_384))
    fd = device.create("f", SIZE)
    assert device.writev(fd, views(data, cuts), 8192) == len(data)
    result = bytearray(len(data))
    assert device.readv(fd, views(result, cuts[::-1] and cuts), 8192) == len(data)
    assert result == data
    device.close(fd)


def test_transfers_larger_than_the_bounce_buffer(device: FileDevice) -> None:
    data = bytearray(os.urandom(3 * (1 << 20) + 4096))
    fd = device.create("f", 4 << 20)
    assert device.writev(fd, views(data, [5]), 0) == len(data)
    result = bytearray(len(data))
    assert device.readv(fd, views(result, [7, 2_000_000]), 0) == len(data)
    assert result == data
    device.close(fd)


def test_more_segments_than_one_call_takes(device: FileDevice) -> None:
    count = 2500
    buffer = aligned_buffer(count * 4096)
    buffer[:] = os.urandom(count) * 4096
    segments = [buffer[i * 4096 : (i + 1) * 4096] for i in range(count)]
    fd = device.create("f", count * 4096)
    assert device.writev(fd, segments, 0) == count * 4096
    expected = bytes(buffer)
    buffer[:] = bytes(count * 4096)
    assert device.readv(fd, segments, 0) == count * 4096
    assert bytes(buffer) == expected
    device.close(fd)


def test_aligned_segments_do_not_pass_the_bounce_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FileDevice(tmp_path)
    if not device.direct:
        pytest.skip("the filesystem refuses direct I/O")
    fd = device.create("f", SIZE)

    def refuse(self: FileDevice) -> memoryview:
        raise AssertionError("bounced")

    monkeypatch.setattr(FileDevice, "_bounce_buffer", refuse)
    buffer = aligned_buffer(16_384)
    assert device.writev(fd, [buffer[:4096], buffer[4096:]], 0) == 16_384
    assert device.readv(fd, [buffer[8192:], buffer[:8192]], 0) == 16_384
    with pytest.raises(AssertionError, match="bounced"):
        device.readv(fd, [memoryview(bytearray(4097))[1:]], 0)
    device.close(fd)


def test_reading_past_the_end_is_short(device: FileDevice) -> None:
    fd = device.create("f", 8192)
    assert device.readv(fd, [memoryview(bytearray(16_384))], 4096) == 4096
    assert device.readv(fd, [aligned_buffer(16_384)], 4096) == 4096
    assert device.readv(fd, [aligned_buffer(4096)], 1 << 20) == 0
    device.close(fd)


def test_created_files_are_private_reserved_and_new(device: FileDevice, tmp_path: Path) -> None:
    fd = device.create("f", SIZE)
    status = (tmp_path / "f").stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == SIZE
    assert status.st_blocks * 512 >= SIZE
    with pytest.raises(FileExistsError):
        device.create("f", SIZE)
    device.close(fd)


def test_failed_reservation_leaves_no_file(
    device: FileDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="full"):
        device.create("f", SIZE)
    assert list(tmp_path.iterdir()) == []


def test_filesystem_without_fallocate(
    device: FileDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "unsupported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    device.close(device.create("f", SIZE))
    assert (tmp_path / "f").stat().st_size == SIZE


def test_refused_direct_io_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real(path, flags, *arguments, **named)

    monkeypatch.setattr(device_module.os, "open", refuse)
    device = FileDevice(tmp_path)
    assert not device.direct
    device.close(device.create("f", 8192))


def test_intact_notices_deletion_and_truncation(device: FileDevice, tmp_path: Path) -> None:
    fd = device.create("f", 8192)
    assert device.is_intact(fd, 8192)
    os.truncate(tmp_path / "f", 4096)
    assert not device.is_intact(fd, 8192)
    os.truncate(tmp_path / "f", 8192)
    device.unlink("f")
    assert not device.is_intact(fd, 8192)
    device.close(fd)


def test_symlinks_are_not_opened(device: FileDevice, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(bytes(4096))
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic"):
        device.open("link")
