"""Device and host memory from one budget, on machines of any size; what cannot fit is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_tiered import launch_server
from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import GiB, MiB
from sglang_tiered.integration import plugin
from sglang_tiered.integration.cache import host_size
from sglang_tiered.integration.identity.model import one_copy
from sglang_tiered.integration.platforms import memory
from sglang_tiered.integration.platforms.memory import WorkingSet, device_pool_bytes

HOST_FRACTION = 0.8 * 0.95
"""What SGLang's ``auto_size_hicache`` takes of the memory that is left, at the most."""


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("machine_gib", [6, 16, 24, 128, 2048])
def test_default_pools_of_all_ranks_fit_together(machine_gib: int, num_ranks: int) -> None:
    allocatable = machine_gib * GiB - memory.PROCESSES_BYTES - GiB - 500 * MiB
    device = device_pool_bytes(
        allocatable, num_ranks=num_ranks, host_bytes=None, has_token_limit=False
    )
    left = allocatable - num_ranks * device
    host = min(2 * device, int(left // num_ranks * HOST_FRACTION))
    assert host >= 1.25 * device, "a host tier below the device pool holds nothing of its own"
    # SGLang's check of the last rank, when all others have touched theirs.
    assert host <= (left - (num_ranks - 1) * host) // num_ranks
    assert num_ranks * (device + host) <= 0.65 * allocatable, "activations need memory too"
    assert num_ranks * device <= 8 * GiB


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group whose memory is 12 GiB, of which SGLang keeps 10."""
    root = Path("/sys/fs/cgroup")
    is_v2 = (root / "cgroup.controllers").exists()
    own = "" if is_v2 else re.findall("memory:/(.*)", Path("/proc/self/cgroup").read_text())[0]
    made = (root if is_v2 else root / "memory") / own / f"sglang-tiered-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError:
        pytest.skip("this user may not make a control group here")
    try:
        (made / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(12 * GiB))
        yield made
    finally:
        made.rmdir()


@pytest.mark.slow
def test_a_control_group_bounds_the_pools(group: Path) -> None:
    program = f"from {memory.__name__} import allocatable_bytes as told; print(told())"
    line = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -c '{program}'"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < 2 * GiB


def test_refused_model_names_needed_and_available_memory() -> None:
    needed = WorkingSet(weights=16 * GiB, token=128 * 1024)
    with pytest.raises(ConfigError, match=r"at least 18.75GiB.*but 16GiB can be had here"):
        memory.check_memory(needed, 15 * GiB)
    memory.check_memory(needed, 18 * GiB)
    with pytest.raises(ConfigError, match="--tier-host-bytes"):
        memory.check_memory(WorkingSet(weights=8 * GiB, token=1024, host=12 * GiB), 20 * GiB)
    with pytest.raises(ConfigError, match=r"1GiB a rank .* 512MiB .*--tier-host-bytes"):
        host_size.check_host_bytes(GiB, 512 * MiB)


def test_working_set_counts_one_copy_of_the_weights(tmp_path: Path) -> None:
    names = ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors")
    for name in (*names, "pytorch_model.bin", "training_args.bin"):
        (tmp_path / name).write_bytes(bytes(5000))
    copy = one_copy([*tmp_path.iterdir()])
    assert {file.name for file in copy} == {"model-1.safetensors", "model-2.safetensors"}


def test_unusable_gpu_is_not_replaced_by_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if plugin.has_accelerator():
        pytest.skip("torch can use the device of this machine")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(plugin, "NVIDIA_CONTROL", tmp_path / "nvidiactl")
    assert plugin.accelerator_problem() is None
    (tmp_path / "nvidiactl").touch()
    with pytest.raises(SystemExit, match="cannot use a GPU"):  # SGLang passes it on
        plugin.activate_platform()
    assert launch_server.main(["--model-path", "m"]) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert plugin.accelerator_problem() is None
