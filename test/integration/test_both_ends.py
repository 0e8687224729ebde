"""A request that computes its front while its back loads, in SGLang's own scheduling pass over a
real cache and store: no wrong KV, nothing left over, whatever happens meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "both_ends_world.py"
DEADLINE_S = 240


@pytest.mark.parametrize(
    ("seed", "mode"), [(1, "overlap"), (3, "normal"), (7, "overlap"), (8, "normal")]
)
def test_random_runs_leave_nothing_wrong_or_behind(tmp_path: Path, seed: int, mode: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), str(seed), mode],
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["planned"] > 0 and counts["jump"] > 0
