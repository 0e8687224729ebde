"""A limit of memory that counts as the machine's: a control group of version 1 or 2."""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


GiB = 1 << 30


@dataclass(frozen=True)
class Group:
    """Its folder, and what may be taken in it."""

    path: Path
    limit_bytes: int

    @classmethod
    def make(cls, limit_bytes: int) -> Group:
        """Raises ``OSError`` where this user may make none."""
        is_v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        root = Path("/sys/fs/cgroup") if is_v2 else Path("/sys/fs/cgroup/memory")
        group = cls(root / f"sglang-tiered-test-{uuid.uuid4().hex[:8]}", limit_bytes)
        try:
            group.path.mkdir()
            limit = group.path / ("memory.max" if is_v2 else "memory.limit_in_bytes")
            limit.write_text(str(limit_bytes))
        except OSError:
            with contextlib.suppress(OSError):
                group.path.rmdir()
            raise
        return group

    @property
    def processes(self) -> Path:
        """The file that a process joins the group by."""
        return self.path / "cgroup.procs"

    def around(self, line: str) -> str:
        """The command line, started within the group."""
        return f"echo $$ > {self.processes} && exec {line}"

    def peak_bytes(self) -> int:
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            if (self.path / name).exists():
                return int((self.path / name).read_text())
        raise AssertionError("the group does not say what it took")


@contextlib.contextmanager
def limited(limit_bytes: int) -> Iterator[Group | None]:
    """A group for as long as the context, in which nothing may run at its end; None where this user
    may make none."""
    try:
        group = Group.make(limit_bytes)
    except OSError:
        yield None
        return
    try:
        yield group
    finally:
        group.path.rmdir()
