"""What another SGLang requires is met in its folder, and never by a CUDA package."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kit.commands import ran
from sglang_tiered.errors import ConfigError
from version_check import overlay
from version_check.overlay import Overlay, requirements_of, unmet_of

HERE = {"openai": "2.8.0", "torch": "2.13.0+cpu", "numpy": "2.3.5"}
PINNED = ["openai==2.8.0", "torch==2.14.1", "flashinfer_python[cu13]==0.7.2", "numpy"]


OF_OTHERS = ("openai==1; sys_platform == 'win32'", "openai==1; extra == 'test'")
CUDA = ("torch==2.15.0", "flashinfer-python==0.7.1")


@pytest.mark.parametrize(
    ("lines", "extra", "treated"),
    [
        (("openai==2.6.1", "numpy"), (), {"openai": "installed"}),
        (CUDA, (), {"torch": "left out", "flashinfer-python": "left out"}),
        (("cuda-tile==1.6",), (), {"cuda-tile": "absent"}),
        (("cuda-tile==1.6",), ("cuda_tile",), {"cuda-tile": "installed"}),
        (OF_OTHERS, (), {}),
    ],
    ids=["beside", "never of CUDA", "a new one", "on demand", "of other machines"],
)
def test_what_a_version_needs_is_treated_so(
    lines: tuple[str, ...], extra: tuple[str, ...], treated: dict[str, str]
) -> None:
    found = unmet_of(requirements_of(lines), requirements_of(PINNED), HERE.get, extra)
    assert {one.name: one.treatment for one in found} == treated


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
    done = ran(
        sys.executable,
        "-c",
        script,
        env=Overlay("9.9.9", tmp_path).environment(os.environ),
        check=True,
    )
    assert done.stdout.split(maxsplit=1) == ["9.9.9", "['other']\n"]


@pytest.mark.parametrize("text", ["latest", "0.5.x", "../etc", ""])
def test_what_is_no_version_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="is no version of SGLang; name one"):
        overlay.checked_version(text)
