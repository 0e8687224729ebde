"""The GPU report keeps its time and what it has learnt, whatever a part does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_report import command, device_tests, disk
from gpu_report.command import PARTS, PartOf
from gpu_report.figures import Part
from gpu_report.pictures import draw
from gpu_report.pod import save_document
from pod_bench.mixes import MIXES, Ceilings, Heads
from pod_bench.report import MixResult, Report

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


def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *names: str,
    given: Sequence[str] = ("--rehearse",),
) -> tuple[int, dict[str, Any]]:
    (tmp_path / "gpu_report").mkdir()
    for name in names:
        (tmp_path / "gpu_report" / f"{name}.py").write_text(HEAD + BODIES[name])
    monkeypatch.setattr(command, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(command, "PARTS", [PartOf(name, name, 5, 5, 5) for name in names])
    monkeypatch.setattr(command, "GRACE_S", 1.0)
    code = command.main([*given, "--out", str(tmp_path / "out")])
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


def test_parts_share_one_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_device", lambda: "a device")
    monkeypatch.setattr(command, "LEAST_S", 1.0)
    monkeypatch.setattr(command, "RESERVE_S", 0.0)
    given = ["--seconds", "4", "--disk", str(tmp_path)]
    code, parts = run(tmp_path, monkeypatch, "hangs", "skips", "fails", given=given)
    assert code == 1
    assert parts["hangs"]["outcome"].startswith("stopped after")
    assert parts["hangs"]["figures"][0]["value"] == 2.0
    assert {parts[name]["outcome"] for name in ("skips", "fails")} == {"no time was left"}


def test_no_server_of_a_stopped_part_lives_on(tmp_path: Path) -> None:
    server = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (tmp_path / "servers").write_text(f"{server.pid}\n")
    command._kill_groups(tmp_path / "servers")
    assert server.wait(10) == -signal.SIGKILL
    assert not (tmp_path / "servers").exists()


@pytest.mark.parametrize(
    "said",
    [
        "test/a.py::test_one PASSED [ 25%]\ntest/a.py::test_two[x y] FAILED [ 50%]\n"
        "test/b.py::test_three SKIPPED (needs a CUDA device) [ 75%]\n"
        "ERROR test/c.py - ModuleNotFoundError: No module named 'msgspec'\n"
        "FAILED test/a.py::test_two[x y] - assert 1 == 2\n",
        "[gw0] [ 25%] PASSED test/a.py::test_one \n[gw1] [ 50%] FAILED test/a.py::test_two[x y] \n"
        "[gw0] [ 75%] SKIPPED test/b.py::test_three \nERROR test/c.py - ImportError\n"
        "FAILED test/a.py::test_two[x y] - assert\n",
    ],
    ids=["alone", "side by side"],
)
def test_tests_that_ended_are_counted_once(said: str, tmp_path: Path) -> None:
    part = Part(tmp_path / "figures", rehearse=False, quick=True, folder=tmp_path)
    device_tests._count(part, said)
    told = {one["name"]: one for one in map(json.loads, part.file.read_text().splitlines())}
    values = [told[f"device_tests_{name}"]["value"] for name in ("passed", "failed", "skipped")]
    assert values == [1, 2, 1], "a file that was not read is a failure"
    assert "test_two" in told["device_tests_failed"]["failed"][0]
    assert "test/c.py" in told["device_tests_failed"]["failed"][1]


def test_second_run_has_the_disk_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {tmp_path / "small": 10**9, tmp_path / "roomy": 55 * 10**9}
    kinds = iter(["tmpfs"] * 2 + ["ext4"] * 4)
    for place in free:
        place.mkdir()
    monkeypatch.setattr(disk, "PLACES", tuple(free))
    monkeypatch.setattr(disk, "filesystem_type", lambda place: next(kinds))
    monkeypatch.setattr(disk, "takes_direct", lambda place: True)
    usage = lambda place: SimpleNamespace(free=free[Path(place)])  # noqa: E731
    monkeypatch.setattr(disk.shutil, "disk_usage", usage)
    assert disk.choose_disk().parent == Path(tempfile.gettempdir()), "memory is no disk"
    first = disk.choose_disk()
    assert first.parent == tmp_path / "roomy"
    (first / "model").mkdir(parents=True)
    (first / "model" / "config.json").touch()
    free[tmp_path / "roomy"] -= 16 * 10**9  # what the first run wrote
    assert disk.choose_disk() == first


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, parts = run(tmp_path, monkeypatch, "fails", "torn", "skips")
    assert code == 1
    assert parts["fails"]["outcome"] == "failed with 1"
    assert "no such kernel" in parts["fails"]["log"]
    assert [figure["name"] for figure in parts["torn"]["figures"]] == ["first"]
    said = capsys.readouterr().out
    assert "skipped: no disk" in said and "2 GB/s" in said
    with tarfile.open(tmp_path / "out" / "report.tgz") as archive:
        names = archive.getnames()
    for part in parts:
        assert {f"report/{part}.{kind}" for kind in ("jsonl", "log", "svg")} <= set(names)
    assert "report/report.json" in names
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"report.json", "report.tgz", "report.txt"}


def test_picture_shows_figures_of_every_unit(tmp_path: Path) -> None:
    figures: list[dict[str, Any]] = [
        {"name": "host_over_computed", "value": 0.1, "unit": "ratio", "min": 0.09, "max": 0.2},
        {"name": "ttft_host", "value": 0.0, "unit": "s"},
        {"name": "copy_small", "value": 0.1, "unit": "GB/s"},
        {"name": "copy_large", "value": 40.0, "unit": "GB/s"},
        {"name": "to_disk", "skipped": "no disk"},
    ]
    parts = {"copies": {"figures": figures}, "pod": {"figures": figures[-1:]}}
    (path,) = draw({"device": "a GPU", "date": "2026-11-26", "parts": parts}, tmp_path)
    shown = path.read_text()
    assert path.name == "copies.svg"
    for figure in figures[:-1]:
        assert f"<!-- {figure['name']} -->" in shown
    assert "to_disk" not in shown


def test_ratios_of_the_kernels_keep_their_spread(tmp_path: Path) -> None:
    samples = {"own_serial": [4.0, 5.0, 8.0], "own_fused": [2.0, 5.0, 4.0]}
    report = Report(Heads(), Ceilings(1.0, 1.0), {})
    report.results = [MixResult(MIXES[0], samples, least_s=1.0)]
    written = json.loads(json.dumps(report.document()))
    part = Part(tmp_path / "figures", rehearse=False, quick=True, folder=tmp_path)
    save_document(part, written)
    told = [json.loads(line) for line in part.file.read_text().splitlines()]
    ratio = {"name": "pod_fused_over_own_serial", "value": 0.5, "unit": "ratio"}
    assert ratio | {"min": 0.5, "max": 1.0, "n": 3} in told
    assert told[-1]["document"] == written


def test_without_a_gpu_only_a_rehearsal_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_device", lambda: None)
    assert command.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
