"""Commands, run in this process or in one of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def refusal(self) -> str:
        """The one sentence of a command that cannot work."""
        assert (self.code, self.out) == (2, "") and self.err.count("\n") == 1, self
        return self.err


Cli = Callable[..., Outcome]
"""``cli("stat", path)`` runs the command."""


def cli_of(main: Callable[[Sequence[str]], int], capture: pytest.CaptureFixture[str]) -> Cli:
    def run(*arguments: object) -> Outcome:
        capture.readouterr()
        code = main([str(argument) for argument in arguments])
        outcome = Outcome(code, *capture.readouterr())
        assert "Traceback" not in outcome.err
        return outcome

    return run


def ran(
    *command: str | Path, timeout_s: float = 60, check: bool = False, **more: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=check, **more
    )
