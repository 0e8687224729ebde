"""What Prometheus' own checker says of metrics."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from kit.programs import program
from kit.scrapes import ours_of

TIMEOUT_S = 120.0


def promtool(*words: str | Path, **more: Any) -> str:
    """What it says; fails where it finds anything wrong, skips where there is no promtool."""
    ended = subprocess.run(
        [program("promtool"), *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        **more,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def check_metrics(text: str) -> None:
    """Fail with what ``promtool check metrics`` finds in our part of a scrape (it ends with 3 for
    a name against the conventions)."""
    promtool("check", "metrics", input=ours_of(text))
