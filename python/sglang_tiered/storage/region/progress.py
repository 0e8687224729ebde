"""A progress bar for work that is usually too short for one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress

__all__ = ["LateProgress"]

_PROGRESS_AFTER_S = 1.0


class LateProgress:
    """A bar on stderr that shows itself only when recovery takes longer than a second."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._started = time.monotonic()
        self._progress: Progress | None = None

    def __enter__(self) -> LateProgress:
        return self

    def advance(self) -> None:
        self._done += 1
        if self._progress is None and time.monotonic() - self._started > _PROGRESS_AFTER_S:
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._progress.add_task("recovering regions", total=self._total)
            self._progress.start()
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=self._done)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
