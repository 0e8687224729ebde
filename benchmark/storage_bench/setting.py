"""What every section is given: sizes, the disk, the raw device, a report and a progress bar."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from rich.progress import Progress

    from storage_bench.figures import Report
    from storage_bench.raw_device import RawDevice
    from storage_bench.workspace import Workspace


T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    quick: bool
    num_samples: int
    workspace: Workspace
    raw_device: RawDevice
    report: Report
    progress: Progress
    lmcache_python: Path | None
    trace: Path | None
    allow_dropped: bool  # rows of it, however many

    @contextlib.contextmanager
    def steps(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """A line of progress for one part of a section; call what it gives after each step."""
        task = self.progress.add_task(title, total=total)
        try:
            yield lambda: self.progress.advance(task)
        finally:
            self.progress.remove_task(task)


def in_turn(sides: Sequence[T], sample: int) -> list[T]:
    """The sides in the order of this sample: whoever is last now is first next time."""
    return list(sides) if sample % 2 == 0 else list(reversed(sides))
