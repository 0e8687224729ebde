"""Processes beside the servers that want cores all the time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


SCRIPT = Path(__file__).parent / "core_burner.py"


@contextlib.contextmanager
def busy_cores(number: int) -> Iterator[None]:
    """So many processes compute while the block runs, each as much as the machine lets it."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(number):
            processes.append(subprocess.Popen([sys.executable, str(SCRIPT)]))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
