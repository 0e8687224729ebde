"""Conversations return from a disk of changing speed on the asynchronous platform: right answers,
nothing left over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from platform_process import environment, run

if TYPE_CHECKING:
    from zygote import Zygotes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
RETRACTIONS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "9"}


def test_changing_disk_spoils_and_leaks_nothing(zygotes: Zygotes, tmp_path: Path) -> None:
    model = tmp_path / "demo"
    command = [sys.executable, str(ROOT / "scripts" / "make_demo_model.py"), str(model)]
    subprocess.run(command, check=True, timeout=120)
    said = run(
        zygotes,
        *("both_ends_rounds.py", str(model), "25", "1"),
        timeout_s=300,
        **environment(MODE="random"),
        **RETRACTIONS,
    )
    assert "error" not in said, said["error"]
    assert said["wrong"] == 0
    assert said["left over"] == {}
    assert said["violations"] == []
    assert said["both ends"] > 0 and said["hits"]["storage"] > 0
