"""What Prometheus' own checker says of metrics."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kit.scrapes import ours_of

__all__ = ["check_metrics"]

COMMAND = Path(__file__).resolve().parents[2] / "scripts" / "promtool"
UNAVAILABLE = 3
TIMEOUT_S = 240.0  # it may have to be fetched


def check_metrics(text: str) -> None:
    """Fail with what ``promtool check metrics`` finds in our part of a scrape; skip where there is
    no promtool."""
    if not COMMAND.exists():
        pytest.skip("scripts/promtool is missing")
    ended = subprocess.run(
        [str(COMMAND), "check", "metrics"],
        input=ours_of(text),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if ended.returncode == UNAVAILABLE:
        pytest.skip(ended.stderr.strip() or "there is no promtool")
    assert ended.returncode == 0, ended.stdout + ended.stderr
