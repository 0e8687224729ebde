"""A Python process with the asynchronous platform, from the outside as a server has it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zygote import Zygotes

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


def run(zygotes: Zygotes, script: str, *arguments: str, timeout_s: float, **more: str) -> Any:
    """Run a script of this folder, forked from a process that has imported SGLang. Returns what the
    JSON of its last line says."""
    with tempfile.NamedTemporaryFile() as output:
        log = Path(output.name)
        process = zygotes.fork([str(FOLDER / script), *arguments], {**os.environ, **more}, log)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith("{")]
    assert code == 0 and lines, text[-9000:]
    return json.loads(lines[-1])
