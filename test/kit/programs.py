"""Programs that are no Python packages, as ``scripts`` of their names find or fetch them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from kit.commands import ran

SCRIPTS = Path(__file__).parents[2] / "scripts"


def program(name: str) -> str:
    """The path of ``redis-server``, ``promtool`` or ``prometheus``; skips the test where there is
    none, with the script's reason."""
    path, why_not = _found(name)
    if why_not:
        pytest.skip(why_not)
    return path


@functools.cache
def _found(name: str) -> tuple[str, str]:
    """A path, or why there is none: asked once, for a machine without a network may take minutes
    to say so."""
    found = ran(SCRIPTS / name, timeout_s=290)
    if found.returncode == 0:
        return found.stdout.strip(), ""
    return "", found.stderr.strip() or f"scripts/{name} ended with {found.returncode}"
