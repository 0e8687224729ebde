"""A Redis of one's own, on a socket in a directory, that keeps nothing."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


SCRIPT = Path(__file__).parents[2] / "scripts" / "redis-server"
TIMEOUT_S = 20.0


def find_redis() -> str | None:
    """The path of the program; None where there is none."""
    found = subprocess.run([SCRIPT], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


@contextlib.contextmanager
def run_redis(program: str, directory: Path) -> Iterator[str]:
    """Its URL."""
    path = directory / "redis.sock"
    command = [program, "--port", "0", "--unixsocket", str(path), "--dir", str(directory)]
    process = subprocess.Popen(
        [*command, "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not path.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("redis-server did not start")
            time.sleep(0.01)
        yield f"unix://{path}"
    finally:
        process.kill()
        process.wait()
