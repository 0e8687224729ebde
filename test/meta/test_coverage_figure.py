"""The gate's figure of coverage stands before pytest's closing line."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from kit.commands import ran

ROOT = Path(__file__).resolve().parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
MEASURED = ("test/unit/policy/test_spill.py", "--cov=sglang_tiered.policy.spill", "--cov-report=")


def test_the_figure_precedes_the_closing_line(tmp_path: Path) -> None:
    """Which is what a reader of the gate looks at last."""
    ended = ran(
        *PYTEST,
        *MEASURED,
        cwd=ROOT,
        env=os.environ | {"COVERAGE_FILE": str(tmp_path / "coverage"), "PYTEST_ADDOPTS": ""},
        timeout_s=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    line, closing = ended.stdout.splitlines()[-2:]
    assert re.fullmatch(r"\d+ passed.* in .*s", closing)
    found = re.match(r"coverage: (\d+) % of the package's lines but those of ", line)
    assert found, line
    assert int(found[1]) > 60  # of the one module that is measured here
