"""Programs that are no Python packages, as ``scripts`` of their names find or fetch them."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

__all__ = ["program"]

SCRIPTS = Path(__file__).parents[2] / "scripts"


@functools.cache
def program(name: str) -> str:
    """The path of ``redis-server``, ``promtool`` or ``prometheus``; skips the test where there is
    none, with the script's reason."""
    found = subprocess.run(
        [SCRIPTS / name], capture_output=True, text=True, timeout=290, check=False
    )
    if found.returncode != 0:
        pytest.skip(found.stderr.strip())
    return found.stdout.strip()
