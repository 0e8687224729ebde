"""Ctrl-C at any moment: it is taken only where nothing can be left behind."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Interruption"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Signals that end the demo. One that comes outside ``allowed`` waits for its next ``check``:
    a process just started is known by then, and a clean-up is over. Only the first one counts, so
    that impatience does not stop the clean-up."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._is_allowed = False

    def install(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def check(self) -> None:
        """Raise what Python raises by itself at Ctrl-C, or end with the code of a shell."""
        if self._number is not None:
            raise (
                KeyboardInterrupt
                if self._number == signal.SIGINT
                else SystemExit(128 + self._number)
            )

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Around whatever takes long: signals raise at once."""
        try:
            self._is_allowed = True
            self.check()
            yield
        finally:
            self._is_allowed = False

    def _on_signal(self, number: int, _: Any) -> None:
        if self._number is None:
            self._number = number
            if self._is_allowed:
                self._is_allowed = False
                self.check()
