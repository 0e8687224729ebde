"""The platform comes from outside, beside what else comes that way, and only where it is wanted."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from platform_process import FOLDER

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("seed", "finders"), [("1", 1), ("", 0)])
def test_the_next_sitecustomize_of_the_path_runs_too(
    tmp_path: Path, seed: str, finders: int
) -> None:
    """Python imports one only: a slow disk behind this one would be quick again."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.next_one_ran = True\n")
    look = "import sys; print(sys.next_one_ran, [type(f).__name__ for f in sys.meta_path])"
    said = subprocess.run(
        [sys.executable, "-c", f"{look}; assert 'torch' not in sys.modules"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(FOLDER), str(tmp_path)]),
            "ASYNC_PLATFORM_SEED": seed,
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert said.startswith("True") and said.count("'_Finder'") == finders
