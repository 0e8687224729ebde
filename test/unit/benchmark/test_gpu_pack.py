"""What is packed for a machine with a GPU is small, and is what a server there imports."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpu_report import pack, unpack
from kit.commands import ran

SCRIPT = Path(unpack.__file__)


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    """Packed packages, of which a server imports two."""
    site, folder = tmp_path / "site", tmp_path / "carried"
    folder.mkdir()
    for name in (
        *("numpy/__init__.py", "sglang/srt/utils.py", "sglang/srt/__pycache__/utils.pyc"),
        *("sglang/test/kits.py", "sglang/multimodal_gen/big.py", "IPython/core.py", "bin/tool"),
        "sglang/srt/rust_extensions/router.so",
        "sglang/srt/rust_extensions/__init__.py",
    ):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("x = 1\n")
    pack.pack_site(site, folder / "site.tar.xz", unpack.VERSION)
    return folder


def said_by(*command: str | Path, env: dict[str, str]) -> str:
    return ran(*command, env=env, check=True).stdout


def unpacked(carried: Path, place: Path) -> dict[str, str]:
    """Run as on the machine: by the standard library alone; then ask a shell what it got."""
    place.mkdir(exist_ok=True)
    line = f'eval "$({sys.executable} -I {SCRIPT} {carried})" && env -0'  # -I: no package is needed
    said = said_by("bash", "-c", line, env={"PATH": os.environ["PATH"], "TMPDIR": str(place)})
    return dict(one.split("=", 1) for one in said.split("\0") if "=" in one)


def test_unpacked_packages_are_found_with_our_entry_points(carried: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    exported = unpacked(carried, place)
    ask = (
        "import importlib.metadata as m, numpy, IPython.display; print(numpy.__file__, "
        "*sorted(p.value for p in m.entry_points(group='sglang.srt.platforms')))"
    )
    said = said_by(exported["PYTHON"], "-S", "-c", ask, env=exported).split()
    assert Path(said[0]).is_relative_to(place)
    assert said[1:] == ["sglang_tiered.integration.plugin:activate_platform"]
