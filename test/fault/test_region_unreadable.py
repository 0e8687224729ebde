"""The disk fails while a store is opened: an error is no damage, and costs no stored page."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from simulation.device import SimulatedDevice
from simulation.engine import REGION, running
from simulation.ledger import TIMEOUT_S, Ledger, fill, keys, pin

from kit.faulty import Fault, FaultyDevice
from sglang_tiered.errors import StoreError
from sglang_tiered.storage.base import Erasure, Reason
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region.format import ERASED_NAME, parse_region_name
from sglang_tiered.storage.region.pins import file_of

CAPACITY = 8 * REGION
STORED = keys(range(24))


class FailingDisk(SimulatedDevice):
    """Parts of files that cannot be read: by name, bytes from and to."""

    def __init__(self, files: dict[str, bytes], bad: dict[str, tuple[int, int]]) -> None:
        super().__init__(files)
        self.bad = bad
        self._opened: dict[int, str] = {}

    def open(self, name: str) -> int:
        fd = super().open(name)
        self._opened[fd] = name
        return fd

    def readv(self, fd: int, segments: Sequence[memoryview], offset: int) -> int:
        start, stop = self.bad.get(self._opened.get(fd, ""), (0, 0))
        if offset < stop and offset + sum(segment.nbytes for segment in segments) > start:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().readv(fd, segments, offset)

    def read_file(self, name: str) -> bytes:
        if name in self.bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read_file(name)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Regions of which the last has no footer, a pin, and purges that say something."""
    device = SimulatedDevice()
    with running(tmp_path_factory.mktemp("stored"), device, capacity_bytes=CAPACITY) as engine:
        gone = keys([1000])
        Ledger().store(engine, gone)
        assert pin(engine, "kept", STORED[:2])
        assert is_true(engine.erase(Erasure.of(gone)), TIMEOUT_S)
        for start in range(0, len(STORED), 3):
            Ledger().store(engine, STORED[start : start + 3])
        assert engine.flush(TIMEOUT_S)
        files = device.crash("kill")
    assert ERASED_NAME in files
    assert len(regions(files)) > 3
    return files


def regions(files: dict[str, bytes]) -> list[str]:
    return sorted(name for name in files if parse_region_name(name) is not None)


def expect_all(tmp_path: Path, device: Any, where: str) -> None:
    with running(tmp_path, device, capacity_bytes=CAPACITY) as engine:
        assert Ledger().load(engine, STORED) == [Reason.OK] * len(STORED), where
        assert [info.num_pages for info in engine.pins()] == [2], where
        assert not any(engine.contains(keys([1000]))), where
        engine.check_integrity()


@pytest.mark.parametrize("operation", ["open", "readv", "read_file"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN])
def test_an_error_that_passes_costs_nothing(
    tmp_path: Path, files: dict[str, bytes], operation: Any, code: int
) -> None:
    counting = FaultyDevice(SimulatedDevice(files))
    with running(tmp_path, counting, capacity_bytes=CAPACITY):
        num_calls = counting.calls.count(operation)
    assert num_calls > 1
    for at in range(num_calls):
        device = FaultyDevice(SimulatedDevice(files), [Fault(at, operation, error=code)])
        expect_all(tmp_path, device, f"{operation} {at}")


PARTS = {
    "header": (0, 4096),
    "first extent": (4096, 8192),
    "third quarter": (REGION // 2, 3 * REGION // 4),
    "trailer": (REGION - 4096, REGION),
    "whole": (0, REGION),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("number", [0, 1, -1])
def test_an_unreadable_region_is_kept_aside(
    tmp_path: Path, files: dict[str, bytes], part: str, number: int
) -> None:
    """Neither deleted, nor written to, nor reclaimed; a later start that can read it has it all."""
    name = regions(files)[number]
    device = FailingDisk(files, {name: PARTS[part]})
    where = f"{part} of {name}"
    with running(tmp_path, device, capacity_bytes=CAPACITY) as engine:
        reasons = set(Ledger().load(engine, STORED))
        assert Reason.OK in reasons, where
        assert reasons <= {Reason.OK, Reason.MISS, Reason.IO_ERROR}, where
        fill(engine, 2000, 40)
        assert engine.stats().physical_bytes <= CAPACITY
        assert Reason.OK in Ledger().load(engine, keys(range(2100, 2120))), where
        engine.check_integrity()
    left = device.crash("kill")
    sealed_well = part in ("third quarter", "first extent") and number != -1
    if sealed_well:  # its footer tells all, so no byte of the bad part was needed
        return
    assert left[name] == files[name], where
    with running(tmp_path, SimulatedDevice(left), capacity_bytes=CAPACITY) as engine:
        held = [key for key, there in zip(STORED, engine.contains(STORED), strict=True) if there]
        assert held, where
        assert set(Ledger().load(engine, held)) == {Reason.OK}, where


@pytest.mark.parametrize("part", ["purges", "header", "trailer", "whole"])
def test_a_disk_that_lost_most_is_refused(
    tmp_path: Path, files: dict[str, bytes], part: str
) -> None:
    """Or what says what was erased. A tier that can hold little says so, and deletes nothing."""
    names = regions(files)
    bad = dict.fromkeys(names, PARTS.get(part, (0, 0)))
    device = FailingDisk(files, {ERASED_NAME: (0, 0)} if part == "purges" else bad)
    told = r"more of its region files cannot be read|ERASED, which says what was erased, cannot"
    capacity = (2 * len(names) - 1) * REGION
    with pytest.raises(StoreError, match=told), running(tmp_path, device, capacity_bytes=capacity):
        pass
    assert device.crash("kill") == files
    assert not device.num_open
    expect_all(tmp_path, SimulatedDevice(files), "the disk is well again")


def test_an_unreadable_pin_is_left(tmp_path: Path, files: dict[str, bytes]) -> None:
    name = file_of("kept")
    device = FailingDisk(files, {name: (0, 0)})
    with running(tmp_path, device, capacity_bytes=CAPACITY) as engine:
        assert engine.pins() == []
        # Nobody knows whose it is, and what it notes would be back.
        assert not is_true(engine.erase(Erasure(tenant=b"t" * 16)), TIMEOUT_S)
    assert device.crash("kill")[name] == files[name]
    expect_all(tmp_path, SimulatedDevice(device.crash("kill")), "the disk is well again")
