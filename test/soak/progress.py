"""How the live soak tells what it does: a line that moves in a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status

if TYPE_CHECKING:
    from life import Record

__all__ = ["Progress"]

GROUPS = ("rounds", "requests", "tokens found", "actions", "faults", "ties")


class Progress:
    """A context in which the line moves."""

    def __init__(self, seed: int, record: Record, end: float) -> None:
        self._record, self._end = record, end
        self._console = Console(highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._ends = threading.Event()
        self._mover = threading.Thread(target=self._move, daemon=True)
        self._console.print(f"live soak, seed {seed}")

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._status = Status("", console=self._console)
            self._status.start()
            self._mover.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        if self._status is not None:
            self._mover.join()
            self._status.stop()

    def say(self, line: str) -> None:
        totals = ", ".join(f"{self._record.total(group)} {group}" for group in GROUPS[:2])
        self._console.print(f"{time.strftime('%H:%M:%S')} {line} ({totals})", markup=False)

    def summary(self) -> None:
        for group in GROUPS:
            self._console.print(f"{group}: {self._record.told(group)}", markup=False)

    def _move(self) -> None:
        assert self._status is not None
        while not self._ends.wait(0.5):
            left = max(0, round(self._end - time.monotonic()))
            last = self._record.recent[-1] if self._record.recent else ""
            counts = f"{self._record.total('requests')} requests"
            self._status.update(f"{left} s left, {counts}; {last}")
