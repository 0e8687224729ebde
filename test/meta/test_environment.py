"""``scripts/env`` refuses a machine that SGLang has no wheels for before it installs anything."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from kit.commands import ran

ROOT = Path(__file__).resolve().parents[2]


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("version", "libc", "sentence"),
    [
        ((3, 10), "glibc 2.36", "SGLang 0.5.23 needs Python 3.11, 3.12 or 3.13, but"),
        ((3, 14), "glibc 2.36", "is: Python 3.14.0. Set PYTHON to another interpreter."),
        ((3, 13), "glibc 2.36", "needs a Rust compiler (outlines_core 0.1.26 has no wheel)."),
        ((3, 12), "glibc 2.31", "needs glibc 2.34 or newer, but this machine has glibc 2.31."),
        ((3, 11), "", "needs glibc 2.34 or newer, but this machine has another C library."),
    ],
)
def test_a_machine_without_wheels_is_refused_untouched(
    tmp_path: Path, version: tuple[int, int], libc: str, sentence: str
) -> None:
    """The interpreter is this one, which says that it is another."""
    for folder in ("scripts", "requirements"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    executable(tools / "cargo", "exit 127")
    executable(tools / "getconf", f"echo {libc}" if libc else "exit 1")
    pretend = f"import sys; sys.version_info = {(*version, 0)}; exec(sys.argv.pop(1))"
    named = "Python {}.{}.0".format(*version)
    executable(
        tools / "python",
        f'if [ "$1" = --version ]; then echo {named}; exit; fi\n'
        f'shift\nexec {shlex.quote(sys.executable)} -c {shlex.quote(pretend)} "$@"',
    )
    ended = ran(
        tmp_path / "scripts/env",
        env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": str(tools / "python")},
    )
    assert ended.returncode == 1
    assert sentence in ended.stderr
    assert ended.stdout == "" and ended.stderr.count("\n") == 1
    assert [path.name for path in (tmp_path / ".venv").iterdir()] == [".lock"]
