"""The GPU report keeps its time and what it has learnt, whatever a part does; what is packed for it
is what a server there imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from gpu_report import command, pack, unpack
from gpu_report.command import PARTS, PartOf
from kit.commands import ran

HEAD = """
import argparse, json, os, signal, subprocess, sys
parser = argparse.ArgumentParser()
for name in ("--file", "--folder"):
    parser.add_argument(name)
parser.add_argument("--rehearse", action="store_true")
options = parser.parse_args()
def save(name, **more):
    with open(options.file, "a") as file:
        file.write(json.dumps({"name": name, **more}) + "\\n")
save("first", value=2.0, unit="GB/s", pid=os.getpid())
"""
BODIES = {
    "hangs": "signal.pause()",
    "deaf": "signal.signal(signal.SIGTERM, signal.SIG_IGN); save('deaf', value=1, unit='yes')\n"
    "while True: signal.pause()",
    "fails": "raise ValueError('no such kernel')",
    "torn": "open(options.file, 'a').write('{\"name\": \"half')",
    "skips": "save('second', skipped='no disk')",
}


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> tuple[int, dict[str, Any]]:
    (tmp_path / "gpu_report").mkdir()
    for name in names:
        (tmp_path / "gpu_report" / f"{name}.py").write_text(HEAD + BODIES[name])
    monkeypatch.setattr(command, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(command, "PARTS", [PartOf(name, name, 5, 5, 5) for name in names])
    monkeypatch.setattr(command, "GRACE_S", 1.0)
    code = command.main(["--rehearse", "--out", str(tmp_path / "out")])
    return code, json.loads((tmp_path / "out" / "report.json").read_text())["parts"]


def test_two_commands_leave_time_to_spare() -> None:
    """Of the 15 minutes that a machine is lent, one goes for its start."""
    assert (command.FIRST + command.SECOND) * 1.15 <= 840
    page = (command.ROOT / "docs" / "gpu.md").read_text()
    for seconds in (command.FIRST, command.SECOND):
        assert f"--seconds {seconds}" in page
    expected = {part.name: part.expected_s for part in PARTS}
    assert all(0 < expected[part.name] <= part.quick_s for part in PARTS)
    assert sum(expected.values()) <= command.FIRST


def test_no_server_of_a_stopped_part_lives_on(tmp_path: Path) -> None:
    server = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (tmp_path / "servers").write_text(f"{server.pid}\n")
    command._kill_groups(tmp_path / "servers")
    assert server.wait(10) == -signal.SIGKILL
    assert not (tmp_path / "servers").exists()


def test_late_part_is_stopped_with_its_figures_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, parts = run(tmp_path, monkeypatch, "hangs", "deaf", "skips")
    assert code == 1
    for name in ("hangs", "deaf"):
        assert parts[name]["outcome"] == "stopped after 5 s"
        assert parts[name]["figures"][0]["value"] == 2.0
        with pytest.raises(ProcessLookupError):
            os.kill(parts[name]["figures"][0]["pid"], 0)
    assert parts["skips"]["outcome"] == "ended", "the next one runs"


def test_failed_part_says_why_and_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, parts = run(tmp_path, monkeypatch, "fails", "torn", "skips")
    assert code == 1
    assert parts["fails"]["outcome"] == "failed with 1"
    assert "no such kernel" in parts["fails"]["log"]
    assert [figure["name"] for figure in parts["torn"]["figures"]] == ["first"]
    with tarfile.open(tmp_path / "out" / "report.tgz") as archive:
        names = archive.getnames()
    assert {f"report/{part}.{kind}" for part in parts for kind in ("jsonl", "log")} <= {*names}


def test_unpacked_packages_are_found_with_our_entry_points(tmp_path: Path) -> None:
    """Unpacked as on the machine, by the standard library alone; a shell is told where."""
    site, carried, place = (tmp_path / name for name in ("site", "carried", "place"))
    carried.mkdir()
    place.mkdir()
    for name in ("numpy/__init__.py", "sglang/srt/utils.py", "IPython/core.py"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("x = 1\n")
    pack.pack_site(site, carried / "site.tar.xz", unpack.VERSION)
    # -I: no package is needed.
    line = f'eval "$({sys.executable} -I {unpack.__file__} {carried})" && env -0'
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
