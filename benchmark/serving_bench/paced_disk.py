"""A disk of a chosen reading speed for the servers of a scenario, ours and HiCache's alike.

``slow_disk/sitecustomize.py`` paces reads inside the servers, so it takes no right to control
groups, follows the speed from read to read, and holds for what the page cache serves as well. The
kernel's limit (``throttle``) works in slices of 100 ms, within which it limits nothing: too coarse
for loads that take as long. Every process has such a disk to itself; one is asked at a time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


HOOK = Path(__file__).parents[1] / "slow_disk"


class Read(NamedTuple):
    """One read of one page or more, as the server timed it."""

    begun_s: float
    ended_s: float
    num_bytes: int


def achieved_bytes_per_s(reads: Iterable[Read]) -> float:
    """Bytes over the time in which at least one read was under way; 0 without reads."""
    busy_s = num_bytes = 0.0
    until_s = 0.0
    for read in sorted(reads):
        busy_s += max(read.ended_s - max(read.begun_s, until_s), 0.0)
        until_s = max(until_s, read.ended_s)
        num_bytes += read.num_bytes
    return num_bytes / busy_s if busy_s else 0.0


@dataclass
class PacedDisk:
    """The files that say how fast, and what was read, in a folder of this run."""

    folder: Path

    def __post_init__(self) -> None:
        self.set_speed(0)

    def environment(self, name: str) -> dict[str, str]:
        """For a server of that name."""
        path = os.environ.get("PYTHONPATH")
        return {
            "PYTHONPATH": os.pathsep.join([str(HOOK), *([path] if path else [])]),
            "SLOW_DISK_READ_FILE": str(self._speed),
            "SLOW_DISK_READ_LOG": str(self._log(name)),
        }

    def set_speed(self, bytes_per_s: float) -> None:
        """From the next read on; 0 is no limit."""
        new = self._speed.with_suffix(".new")
        new.write_text(str(bytes_per_s))
        new.replace(self._speed)

    def reads(self, name: str, start: int = 0) -> list[Read]:
        """What a system has read, but for its first ``start`` reads."""
        if not self._log(name).exists():
            return []
        lines = [line.split() for line in self._log(name).read_text().splitlines()[start:]]
        return [Read(float(begun), float(ended), int(size)) for begun, ended, size in lines]

    @property
    def _speed(self) -> Path:
        return self.folder / "speed"

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.reads"
