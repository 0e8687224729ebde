"""What the scenarios of paced disks and of many users decide before anything is divided."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from serving_bench.balanced import ideal_s, paced_bytes_per_s, prefill_s_per_token
from serving_bench.client import Sample
from serving_bench.neighbour import busy_cores
from serving_bench.paced_disk import PacedDisk, Read, achieved_bytes_per_s

if TYPE_CHECKING:
    from pathlib import Path

READER = """
import sys, time
from pathlib import Path
from sglang_tiered.storage.region.device import FileDevice, aligned_buffer
device = FileDevice(Path(sys.argv[1]), direct=False)
fd = device.create("region", 1 << 20)
page = aligned_buffer(1 << 16)
for number in range(4):
    assert device.readv(fd, [page], number << 16) == 1 << 16
"""


def sample(
    *,
    ttft_s: float = 1.0,
    started_s: float = 0.0,
    latency_s: float = 1.0,
    prompt: int = 200,
    reusable: int = 0,
) -> Sample:
    cached = {"device": 0, "host": 0, "storage": 0}
    return Sample("a", started_s, ttft_s, (), latency_s, prompt, reusable, (1,), cached)


def test_the_ideal_shares_work_between_both_ends() -> None:
    assert ideal_s(prefill_s=1.0, load_s=1.0, new_s=0.1) == pytest.approx(0.6)
    # A disk that takes forever leaves the prefill, one that takes no time leaves the new tokens.
    assert ideal_s(1.0, 1e9, 0.1) == pytest.approx(1.1)
    assert ideal_s(1.0, 1e-9, 0.1) == pytest.approx(0.1)


def test_the_prefill_leaves_new_tokens_out() -> None:
    full = [sample(ttft_s=1.5, reusable=150), sample(ttft_s=9.0, reusable=150)] + [
        sample(ttft_s=1.78, reusable=150)
    ]
    new = [sample(ttft_s=0.5)] * 3
    assert prefill_s_per_token(full, new) == pytest.approx(1.28 / 128)


def test_the_pace_makes_loads_r_times_prefill() -> None:
    speed = paced_bytes_per_s(0.5, prefill_s=1e-3, token_bytes=8000)
    assert 8000 / speed == pytest.approx(0.5 * 1e-3)


def test_reads_side_by_side_share_one_disk() -> None:
    # Two at once and one later: 3 units in the 2 s in which anything was read.
    reads = [Read(5.0, 6.0, 1), Read(0.0, 1.0, 1), Read(0.5, 1.0, 1)]
    assert achieved_bytes_per_s(reads) == 1.5
    assert achieved_bytes_per_s([]) == 0.0


def test_a_paced_disk_reads_at_its_speed(tmp_path: Path) -> None:
    disk = PacedDisk(tmp_path)
    disk.set_speed(1 << 20)
    (tmp_path / "store").mkdir()
    command = [sys.executable, "-c", READER, str(tmp_path / "store")]
    environment = {**os.environ, **disk.environment("tiered")}
    subprocess.run(command, env=environment, check=True, timeout=60)
    reads = disk.reads("tiered")
    assert [read.num_bytes for read in reads] == [1 << 16] * 4
    assert 0.5 * (1 << 20) < achieved_bytes_per_s(reads) <= 1 << 20
    assert disk.reads("tiered", start=3) == reads[3:]
    assert disk.reads("stock") == []


def test_neighbours_end_with_what_they_disturb() -> None:
    before = set(psutil.Process().children())
    with busy_cores(2):
        started = set(psutil.Process().children()) - before
        assert len(started) == 2
    assert not any(process.is_running() for process in started)
