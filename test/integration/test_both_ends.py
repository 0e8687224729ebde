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


@pytest.mark.parametrize(("seeds", "mode"), [("2-4", "overlap"), ("5-7", "normal")])
def test_random_runs_leave_nothing_wrong_or_behind(tmp_path: Path, seeds: str, mode: str) -> None:
    """Nor does any request wait longer than it may, or find what was purged or forgotten."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), seeds, mode],
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for what in ("planned", "jump", "held up", "purge", "forget", "found after a purge"):
        assert sum(run.get(what, 0) for run in runs) > 0, what
