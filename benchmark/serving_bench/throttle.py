"""A limit on what processes read from a disk, by the kernel: alike for buffered and direct I/O.

Control groups do it, version 2 (``io.max``) or version 1 (``blkio.throttle``), whichever has the
controller, and only root may. Reads that the page cache serves are not limited, so it is emptied
first. Writes are left alone.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_SYS_BLOCK = Path("/sys/dev/block")


class NoThrottleError(Exception):
    """Reads cannot be limited here. One sentence."""


def disk_of(directory: Path, sys_block: Path = _SYS_BLOCK) -> str:
    """``major:minor`` of the whole disk a folder is on: limits are set on disks, not partitions.
    Raises ``NoThrottleError`` where the filesystem is on none of its own."""
    device = os.stat(directory).st_dev
    entry = sys_block / f"{os.major(device)}:{os.minor(device)}"
    if not entry.exists():
        raise NoThrottleError(
            f"{directory} is on no block device, so its reads cannot be limited; pass a "
            "--directory on a disk, or leave slow_disk out with --only."
        )
    folder = entry.resolve()
    if (folder / "partition").exists():
        folder = folder.parent
    return (folder / "dev").read_text().strip()


@dataclass
class ReadThrottle:
    """``root`` is the control group hierarchy; ``version`` says which files it has."""

    root: Path
    version: int
    disk: str
    proc: Path = Path("/proc")

    @property
    def description(self) -> str:
        file = "io.max" if self.version == 2 else "blkio.throttle.read_bps_device"
        return f"control groups version {self.version} ({file})"

    @contextlib.contextmanager
    def limit(self, pids: Iterable[int], bytes_per_s: int) -> Iterator[None]:
        """These processes together read no faster, and go back where they were at the end."""
        group = self.root / f"bench-serving-{os.getpid()}"
        group.mkdir()
        homes: dict[int, Path] = {}
        try:
            if self.version == 2:
                (group / "io.max").write_text(f"{self.disk} rbps={bytes_per_s}\n")
            else:
                limit_file = group / "blkio.throttle.read_bps_device"
                limit_file.write_text(f"{self.disk} {bytes_per_s}\n")
            for pid in pids:
                homes[pid] = self._group_of(pid)
                (group / "cgroup.procs").write_text(f"{pid}\n")
            yield
        finally:
            for pid, home in homes.items():
                with contextlib.suppress(OSError):  # it may have ended
                    (home / "cgroup.procs").write_text(f"{pid}\n")
            group.rmdir()

    def _group_of(self, pid: int) -> Path:
        for line in (self.proc / str(pid) / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" if self.version == 2 else "blkio" in controllers.split(","):
                return self.root / path.lstrip("/")
        return self.root


def find_throttle(directory: Path, mountinfo: str | None = None) -> ReadThrottle:
    """The way to limit reads of that folder on this machine. Raises ``NoThrottleError``."""
    disk = disk_of(directory)
    text = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
    for root, version in _hierarchies(text):
        wanted = "io.max" if version == 2 else "blkio.throttle.read_bps_device"
        probe = root / f"bench-serving-probe-{os.getpid()}"
        with contextlib.suppress(OSError):
            probe.mkdir()
            try:
                if (probe / wanted).exists():
                    return ReadThrottle(root, version, disk)
            finally:
                probe.rmdir()
    raise NoThrottleError(
        "Limiting what a server reads takes root and a control group hierarchy with the io or "
        "blkio controller enabled; leave slow_disk out with --only."
    )


def _hierarchies(mountinfo: str) -> Iterator[tuple[Path, int]]:
    for line in mountinfo.splitlines():
        fields = line.split()
        if "-" not in fields:
            continue
        kind, *rest = fields[fields.index("-") + 1 :]
        if kind == "cgroup2":
            yield Path(fields[4]), 2
        elif kind == "cgroup" and "blkio" in rest[-1].split(","):
            yield Path(fields[4]), 1


def process_tree(pid: int) -> list[int]:
    """A process and everything it has started."""
    root = psutil.Process(pid)
    return [pid, *(child.pid for child in root.children(recursive=True))]
