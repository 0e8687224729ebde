"""Live progress on a terminal, one line a phase anywhere else."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

__all__ = ["Phases"]


class Phases:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn("line", finished_text="[green]*[/]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[count]}", justify="right"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,  # drawing takes time from what is timed
            disable=not console.is_terminal or console.is_dumb_terminal,
        )

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        with self._progress:
            yield

    @contextlib.contextmanager
    def phase(self, title: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Gives what is to be called after each of ``total`` steps."""
        if self._progress.disable:
            self._console.print(title, highlight=False)
            yield lambda: None
            return
        progress, done = self._progress, 0
        task = progress.add_task(title, total=total, count="" if total is None else f"0/{total}")

        def step() -> None:
            nonlocal done
            done += 1
            progress.update(task, completed=done, count=f"{done}/{total}")

        yield step
        progress.update(task, total=max(done, 1), completed=max(done, 1))
