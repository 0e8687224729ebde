"""What is packed for a machine with a GPU is small, and is what a server there imports."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpu_report import pack, unpack
from kit.commands import ran

SCRIPT = Path(unpack.__file__)


def test_unpacked_packages_are_found_with_our_entry_points(tmp_path: Path) -> None:
    """Unpacked as on the machine, by the standard library alone; a shell is told where."""
    site, carried, place = (tmp_path / name for name in ("site", "carried", "place"))
    carried.mkdir()
    place.mkdir()
    for name in ("numpy/__init__.py", "sglang/srt/utils.py", "IPython/core.py"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("x = 1\n")
    pack.pack_site(site, carried / "site.tar.xz", unpack.VERSION)
    line = f'eval "$({sys.executable} -I {SCRIPT} {carried})" && env -0'  # -I: no package is needed
    given = {"PATH": os.environ["PATH"], "TMPDIR": str(place)}
    said = ran("bash", "-c", line, env=given, check=True).stdout
    exported = dict(one.split("=", 1) for one in said.split("\0") if "=" in one)
    ask = (
        "import importlib.metadata as m, numpy, IPython.display; print(numpy.__file__, "
        "*sorted(p.value for p in m.entry_points(group='sglang.srt.platforms')))"
    )
    told = ran(exported["PYTHON"], "-S", "-c", ask, env=exported, check=True).stdout.split()
    assert Path(told[0]).is_relative_to(place)
    assert told[1:] == ["sglang_tiered.integration.plugin:activate_platform"]
