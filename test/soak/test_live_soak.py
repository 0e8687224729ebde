"""SGLang's schedulers under everything at once, for as long as ``scripts/soak live`` says: the
worlds that the short suites run with a few seeds go on with new ones. ``SOAK_SEED`` draws the same
again; how threads interleave is the machine's.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from platform_process import environment, run
from zygote import Zygotes

from kit.small_model import write_small_model

SECONDS = float(os.environ.get("LIVE_SOAK_SECONDS", "0"))
SEED = int(os.environ.get("SOAK_SEED", "0"))
WORLD = Path(__file__).parents[1] / "integration" / "both_ends_world.py"
DEADLINE_S = 300.0
MODES = ("random", "late", "late-forward")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(0),
    pytest.mark.skipif(SECONDS <= 0, reason="LIVE_SOAK_SECONDS is not set; run scripts/soak live"),
]


def seeds() -> Iterator[int]:
    """For half of the time, one at least."""
    end = time.monotonic() + SECONDS / 2
    for seed in itertools.count(SEED):
        print(f"seed {seed}", flush=True)
        yield seed
        if time.monotonic() >= end:
            return


def test_random_traffic_leaves_nothing_wrong_or_behind(tmp_path: Path) -> None:
    for seed in seeds():
        mode = ("overlap", "normal")[seed % 2]
        command = [sys.executable, str(WORLD), str(tmp_path), str(seed), mode]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 0, f"seed {seed}, {mode}:\n{done.stderr[-4000:]}"


def test_changing_disks_spoil_and_leak_nothing(zygotes: Zygotes, tmp_path: Path) -> None:
    model = str(write_small_model(tmp_path / "model"))
    for seed in seeds():
        settings = environment(seed=seed, MODE=MODES[seed % len(MODES)])
        words = ("both_ends_rounds.py", model, "25", str(seed))
        said: Any = run(zygotes, *words, timeout_s=DEADLINE_S, **settings)
        assert "error" not in said, f"seed {seed}:\n{said['error']}"
        found = said["wrong"], said["left over"], said["violations"]
        assert found == (0, {}, []), f"seed {seed}: {found}"
