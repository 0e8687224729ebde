"""Live progress on a terminal, one line a phase anywhere else."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

__all__ = ["Phases", "Step", "one_line"]

_HEARD = 30  # columns


def one_line(text: str) -> str:
    """What a server said, as a terminal may show it: another's server may say anything."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


class Step(NamedTuple):
    """``done`` is to be called after each step, ``hear`` with what an answer says so far."""

    done: Callable[[], None]
    hear: Callable[[str], None]


class Phases:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn("line", finished_text="[green]*[/]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[count]}", justify="right"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[heard]}"),
            console=console,
            refresh_per_second=4,  # drawing takes time from what is timed
            disable=not console.is_terminal or console.is_dumb_terminal,
        )

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        with self._progress:
            yield

    @contextlib.contextmanager
    def phase(self, title: str, total: int | None = None) -> Iterator[Step]:
        """Gives what is to be called after each of ``total`` steps."""
        if self._progress.disable:
            self._console.print(title, highlight=False)
            yield Step(lambda: None, lambda text: None)
            return
        progress, done = self._progress, 0
        count = "" if total is None else f"0/{total}"
        task = progress.add_task(title, total=total, count=count, heard="")

        def step() -> None:
            nonlocal done
            done += 1
            progress.update(task, completed=done, count=f"{done}/{total}")

        def hear(text: str) -> None:
            progress.update(task, heard=escape(one_line(text)[-_HEARD:] + " "), refresh=True)

        yield Step(step, hear)
        progress.update(task, total=max(done, 1), completed=max(done, 1), heard="")

    def say(self, line: str) -> None:
        """A line that stays, above what moves."""
        self._console.print(line, highlight=False, soft_wrap=True)
