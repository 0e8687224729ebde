"""The decorator of a device does what a test tells them, no more."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kit.faulty import Fault, FaultyDevice
from sglang_tiered.storage.region.device import FileDevice


def device(path: Path, *faults: Fault, **kwargs: float) -> FaultyDevice:
    return FaultyDevice(FileDevice(path, direct=False), faults, **kwargs)  # type: ignore[arg-type]


def test_operation_n_fails_and_its_neighbours_do_not(tmp_path: Path) -> None:
    faulty = device(tmp_path, Fault(2, error=errno.EIO), Fault(1, "sync", error=errno.ENOSPC))
    fd = faulty.create("f", 8192)
    faulty.sync(fd)
    with pytest.raises(OSError, match="Input/output"):
        faulty.free_bytes()
    with pytest.raises(OSError, match="No space"):
        faulty.sync(fd)
    faulty.sync(fd)
    assert faulty.calls == ["create", "sync", "free_bytes", "sync", "sync"]
    faulty.close(fd)


def test_flipped_bit_and_short_transfers(tmp_path: Path) -> None:
    faulty = device(tmp_path, Fault(0, "readv", flip_bit=9), Fault(1, "readv", short_bytes=5000))
    fd = faulty.create("f", 8192)
    buffer = memoryview(bytearray(8192))
    assert faulty.readv(fd, [buffer], 0) == 8192
    assert buffer[1] == 2
    assert faulty.readv(fd, [buffer], 0) == 4096
    faulty.close(fd)


def test_same_seed_same_failures(tmp_path: Path) -> None:
    def outcomes(seed: int) -> list[bool]:
        faulty, results = device(tmp_path, seed=seed, failure_rate=0.5), [True] * 50
        for number in range(50):
            try:
                faulty.free_bytes()
            except OSError:
                results[number] = False
        return results

    assert outcomes(1) == outcomes(1) != outcomes(2)
    assert 10 < sum(outcomes(1)) < 40
