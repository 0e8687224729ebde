"""The report for a machine with a GPU, rehearsed on this one: every part's program, to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import ROOT
from gpu_report.command import PARTS

pytestmark = [
    *(pytest.mark.server, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]


def test_every_part_ends_without_a_gpu(tmp_path: Path) -> None:
    """Whole before a machine is taken, as ``docs/gpu.md`` says."""
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_report", "--rehearse", "--out", tmp_path],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=1450,
        check=False,
    )
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    ended = {name: part["outcome"] for name, part in parts.items()}
    assert ended == dict.fromkeys((part.name for part in PARTS), "ended"), done.stdout[-3000:]
    assert done.returncode == 0 and (tmp_path / "report.tgz").exists()
    figures = {one["name"]: one for part in parts.values() for one in part["figures"]}
    assert not [name for name, one in figures.items() if "skipped" in one]
    for name in ("packages_lacking", "device_tests_failed", "device_tests_passed"):
        assert figures[name]["value"] == 0, figures[name]
    assert figures["device_tests_skipped"]["value"] > 0
    for name in ("ttft_host", "ttft_nvme", "ttft_nvme_forced"):
        assert figures[name]["share_of_prompt"] > 0.8, "it came from somewhere else"
    equal = figures["answers_equal"]
    assert equal["value"] == equal["of"] > 9 and figures["pod_results_equal"]["value"] == 1
    assert figures["mixed_pod_layers"]["value"] > 0
