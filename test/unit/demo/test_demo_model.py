"""The demo model: the same bytes from the same seed, and nothing else overwritten."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from kit.commands import ran

MAKER = Path(__file__).resolve().parents[3] / "scripts" / "make_demo_model.py"


def make(out_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return ran(sys.executable, str(MAKER), str(out_dir), *arguments)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out_dir = tmp_path_factory.mktemp("with space") / "model"
    result = make(out_dir)
    assert result.returncode == 0, result.stderr
    return out_dir


def test_existing_other_folder_is_refused_and_untouched(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    result = make(tmp_path / "mine")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes"]

    before = (model_dir / "model.safetensors").stat().st_ctime_ns
    assert make(model_dir).returncode == 0
    for other in (("--seed", "7"), ("--shape", "24m")):
        assert "is not this model" in make(model_dir, *other).stderr
    assert (model_dir / "model.safetensors").stat().st_ctime_ns == before


def test_demo_model_never_changes_its_bytes(model_dir: Path) -> None:
    digest = hashlib.sha256((model_dir / "model.safetensors").read_bytes()).hexdigest()
    assert digest.startswith("480d0ec523d0b976")
