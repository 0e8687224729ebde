"""What Prometheus' own checker says of metrics."""

from __future__ import annotations

import subprocess

from kit.programs import program
from kit.scrapes import ours_of

__all__ = ["check_metrics"]

TIMEOUT_S = 60.0


def check_metrics(text: str) -> None:
    """Fail with what ``promtool check metrics`` finds in our part of a scrape (it ends with 3 for
    a name against the conventions); skip where there is no promtool."""
    ended = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=ours_of(text),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
