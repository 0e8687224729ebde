"""Commands, run in this process or in one of their own."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
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


def run_here(words: list[str], root: Path) -> tuple[Any, str]:
    """Run a Python program in this process: its exit code, and what it said."""
    os.chdir(root)
    os.environ["COLUMNS"] = "200"
    sys.path[:0] = [str(root / "benchmark")]
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    run, text, code = runpy.run_module if is_module else runpy.run_path, io.StringIO(), None
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            run(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            code = end.code
    return code or 0, text.getvalue()
