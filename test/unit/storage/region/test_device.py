"""FileDevice on real files, direct where the filesystem allows it and buffered."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from sglang_tiered.storage.region import device as device_module
from sglang_tiered.storage.region.device import FileDevice, aligned_buffer

SIZE = 1 << 20


@pytest.fixture(params=[None, False], ids=["probed", "buffered"])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> FileDevice:
    return FileDevice(tmp_path, direct=request.param)


def views(view: memoryview, cuts: list[int]) -> list[memoryview]:
    edges = [0, *cuts, len(view)]
    return [view[start:stop] for start, stop in zip(edges[:-1], edges[1:], strict=True)]


@pytest.mark.parametrize(
    ("nbytes", "cuts"),
    [
        *((16_384, cuts) for cuts in ([], [4096], [1], [3, 3, 8000], [4096, 4097, 12_000])),
        ((3 << 20) + 4096, [5, 2_000_000]),  # more than the bounce buffer holds
        (2500 * 4096, [*range(4096, 2500 * 4096, 4096)]),  # more than one call takes
    ],
)
def test_any_segmentation_round_trips(device: FileDevice, nbytes: int, cuts: list[int]) -> None:
    data = aligned_buffer(nbytes)
    data[:] = os.urandom(nbytes)
    fd = device.create("f", 8192 + nbytes)
    assert device.writev(fd, views(data, cuts), 8192) == nbytes
    result = memoryview(bytearray(nbytes))
    assert device.readv(fd, views(result, [nbytes - cut for cut in reversed(cuts)]), 8192) == nbytes
    assert result == data
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


def test_created_files_are_private_reserved_and_new(device: FileDevice, tmp_path: Path) -> None:
    fd = device.create("f", SIZE)
    status = (tmp_path / "f").stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == SIZE
    assert status.st_blocks * 512 >= SIZE
    with pytest.raises(FileExistsError):
        device.create("f", SIZE)
    # And a read past the end is short.
    assert device.readv(fd, [memoryview(bytearray(16_384))], SIZE - 4096) == 4096
    assert device.readv(fd, [aligned_buffer(16_384)], SIZE - 4096) == 4096
    assert device.readv(fd, [aligned_buffer(4096)], 2 * SIZE) == 0
    device.close(fd)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EOPNOTSUPP])
def test_a_failed_reservation_leaves_no_file(
    device: FileDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A filesystem that cannot reserve makes the file all the same."""

    def fail(fd: int, offset: int, length: int) -> None:
        raise OSError(code, "refused")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    if code == errno.ENOSPC:
        with pytest.raises(OSError, match="refused"):
            device.create("f", SIZE)
        assert list(tmp_path.iterdir()) == []
    else:
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
