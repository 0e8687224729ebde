"""What another SGLang requires is met in its folder, and never by a CUDA package."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from sglang_tiered.errors import ConfigError
from version_check import overlay
from version_check.overlay import Overlay, Unmet, requirements_of, unmet_of

if TYPE_CHECKING:
    from pathlib import Path

HERE = {"openai": "2.8.0", "torch": "2.13.0+cpu", "numpy": "2.3.5"}
PINNED = ["openai==2.8.0", "torch==2.14.1", "flashinfer_python[cu13]==0.7.2", "numpy"]


def unmet(*lines: str, extra: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    found = unmet_of(requirements_of(lines), requirements_of(PINNED), HERE.get, extra)
    return [(one.name, one.treatment) for one in found]


def test_an_excluded_version_is_installed_beside() -> None:
    assert unmet("openai==2.6.1", "numpy") == [("openai", "installed")]


def test_cuda_packages_stay_out_in_any_version() -> None:
    assert unmet("torch==2.15.0", "flashinfer-python==0.7.1") == [
        ("torch", "left out"),
        ("flashinfer-python", "left out"),
    ]


def test_a_new_requirement_is_installed_on_demand() -> None:
    line = "cuda-tile==1.6"
    assert unmet(line) == [("cuda-tile", "absent")]
    assert unmet(line, extra=("cuda_tile",)) == [("cuda-tile", "installed")]
    assert str(Unmet("cuda-tile", "==1.6", None, "absent")) == (
        "cuda-tile==1.6 (absent; .venv has none)"
    )


def test_requirements_of_other_machines_do_not_count() -> None:
    assert unmet("openai==1; sys_platform == 'win32'", "openai==1; extra == 'test'") == []


def test_the_version_of_the_environment_needs_no_folder(tmp_path: Path) -> None:
    installed = importlib.metadata.version("sglang")
    found = overlay.make(installed, tmp_path / "cache")
    assert found == Overlay(installed, None)
    assert not (tmp_path / "cache").exists()


def test_the_folder_decides_version_and_entry_points(tmp_path: Path) -> None:
    """Metadata of the environment's SGLang stays hidden behind the folder's."""
    info = tmp_path / "sglang-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nother = json:dumps\n")
    script = (
        "import importlib.metadata as m; print(m.version('sglang'), sorted(e.name for e in "
        "m.entry_points(group='sglang.srt.plugins') if e.dist.name == 'sglang'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=Overlay("9.9.9", tmp_path).environment(os.environ),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split(maxsplit=1) == ["9.9.9", "['other']\n"]


@pytest.mark.parametrize("text", ["latest", "0.5.x", "../etc", ""])
def test_what_is_no_version_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="is no version of SGLang; name one"):
        overlay.checked_version(text)


def test_a_version_that_pypi_lacks_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip itself, told to look nowhere."""
    for name, value in {
        "NO_INDEX": "1",
        "FIND_LINKS": str(tmp_path),
        "CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    cache = tmp_path / "cache"
    with pytest.raises(ConfigError, match=r"PyPI has no sglang==9\.9\.9 for this machine's Python"):
        overlay.make("9.9.9", cache)
    assert list(cache.iterdir()) == []
