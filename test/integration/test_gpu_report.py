"""The report for a machine with a GPU, rehearsed on this one: every part's program, to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from gpu_report.command import PARTS

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("machine", "device_tests", "copies")


@pytest.mark.parametrize(
    "only", [QUICK, pytest.param((), marks=pytest.mark.long)], ids=["quick", "all"]
)
def test_every_part_ends_without_a_gpu(only: tuple[str, ...], tmp_path: Path) -> None:
    """Whole before a machine is taken, as ``docs/gpu.md`` says."""
    chosen = [word for name in only for word in ("--only", name)]
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_report", "--rehearse", "--out", tmp_path, *chosen],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert {name: part["outcome"] for name, part in report["parts"].items()} == dict.fromkeys(
        only or (part.name for part in PARTS), "ended"
    ), (done.stdout[-3000:], [part.get("log") for part in report["parts"].values()])
    assert done.returncode == 0
    with tarfile.open(tmp_path / "report.tgz") as archive:
        pictures = [name for name in archive.getnames() if name.endswith(".svg")]
    assert len(pictures) == len(report["parts"])
    figures = {one["name"]: one for part in report["parts"].values() for one in part["figures"]}
    assert not [name for name, one in figures.items() if "skipped" in one]
    assert figures["packages_lacking"]["value"] == 0, figures["packages_lacking"]["names"]
    assert figures["device_tests_failed"]["value"] == 0 < figures["device_tests_skipped"]["value"]
    assert figures["page_copy_speedup_over_copies_page64"]["value"] > 0
