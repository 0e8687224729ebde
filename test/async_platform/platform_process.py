"""A Python process with the asynchronous platform, from the outside as a server has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "WHEN_WAITED_FOR", "environment", "run"]

WHEN_WAITED_FOR = {"MODE": "all-late", "HORIZON_S": "1000"}
"""Settings with which no task is done before it is awaited."""

FOLDER = Path(__file__).resolve().parent


def environment(report: Path | None = None, *, seed: int = 1, **settings: str) -> dict[str, str]:
    """What puts a process on the platform; ``settings`` without ``ASYNC_PLATFORM_``."""
    paths = [str(FOLDER), os.environ.get("PYTHONPATH", "")]
    named = {f"ASYNC_PLATFORM_{name}": value for name, value in settings.items()}
    if report is not None:
        named["ASYNC_PLATFORM_REPORT"] = str(report)
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "ASYNC_PLATFORM_SEED": str(seed),
        **named,
    }


def run(script: str, *arguments: str, timeout_s: float, **more: str) -> Any:
    """Run a script of this folder, which looks for no garbage: it imports SGLang and ends soon.
    Returns what the JSON of its last line says."""
    begin = (
        "import gc, runpy, sys; gc.disable(); del sys.argv[0]; sys.path[0] = sys.argv[1]; "
        "del sys.argv[1]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", begin, str(FOLDER / script), str(FOLDER), *arguments],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])
