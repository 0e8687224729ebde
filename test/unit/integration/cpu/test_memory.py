"""Device and host memory from one budget, on machines of any size; what cannot fit is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from zygote import Zygotes

from sglang_tiered.config import GiB, MiB
from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.cache import host_size
from sglang_tiered.integration.cpu import memory
from sglang_tiered.integration.cpu.memory import WorkingSet, device_pool_bytes
from sglang_tiered.integration.identity.model import one_copy
from sglang_tiered.integration.launch import accelerator

ROOT = Path(__file__).parents[4]
HOST_FRACTION = 0.8 * 0.95
"""What SGLang's ``auto_size_hicache`` takes of the memory that is left, at the most."""


def auto_sized_host_bytes(device_bytes: int, left: int, num_ranks: int) -> int:
    return min(2 * device_bytes, int(left // num_ranks * HOST_FRACTION))


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("machine_gib", [6, 16, 24, 128, 2048])
def test_default_pools_of_all_ranks_fit_together(machine_gib: int, num_ranks: int) -> None:
    allocatable = machine_gib * GiB - memory.PROCESSES_BYTES - GiB - 500 * MiB
    device = device_pool_bytes(
        allocatable, num_ranks=num_ranks, host_bytes=None, has_token_limit=False
    )
    left = allocatable - num_ranks * device
    host = auto_sized_host_bytes(device, left, num_ranks)
    assert host >= 1.25 * device, "a host tier below the device pool holds nothing of its own"
    # SGLang's check of the last rank, when all others have touched theirs.
    assert host <= (left - (num_ranks - 1) * host) // num_ranks
    assert num_ranks * (device + host) <= 0.65 * allocatable, "activations need memory too"
    assert num_ranks * device <= 8 * GiB


def test_refused_model_names_needed_and_available_memory() -> None:
    needed = WorkingSet(weights=16 * GiB, token=128 * 1024)
    with pytest.raises(ConfigError, match=r"at least 18.75GiB.*but 16GiB can be had here"):
        memory.check_memory(needed, 15 * GiB)
    memory.check_memory(needed, 18 * GiB)
    with pytest.raises(ConfigError, match="--tier-host-bytes"):
        memory.check_memory(WorkingSet(weights=8 * GiB, token=1024, host=12 * GiB), 20 * GiB)
    with pytest.raises(ConfigError, match=r"1GiB a rank .* 512MiB .*--tier-host-bytes"):
        host_size.check_host_bytes(GiB, 512 * MiB)


@pytest.mark.parametrize(
    ("stored", "loaded", "quantized", "factor"),
    [
        ("float32", "float16", False, 0.5),  # what SGLang does by default
        ("bfloat16", "float32", False, 2.0),
        ("bfloat16", "float32", True, 1.0),
        (None, "float32", False, 1.0),
    ],
)
def test_weights_count_with_their_size_in_memory(
    stored: str | None, loaded: str, quantized: bool, factor: float
) -> None:
    hf_config = SimpleNamespace(dtype=stored, quantization_config={} if quantized else None)
    model = SimpleNamespace(hf_config=hf_config, dtype=getattr(torch, loaded))
    assert memory._widening(model) == factor


@pytest.mark.parametrize(("num_replicas", "code"), [(1, 2), (2, 1)])
def test_scheduler_refusal_is_one_sentence_and_code_2(
    zygotes: Zygotes, tmp_path: Path, num_replicas: int, code: int
) -> None:
    """The controller of replicas, of groups of DP attention too, sees exceptions only."""
    script, log = tmp_path / "refuses.py", tmp_path / "log"
    script.write_text(
        "from sglang.srt.runtime_context import get_parallel\n"
        "from sglang_tiered.errors import ConfigError\n"
        "from sglang_tiered.integration import hooks\n"
        "def original(*_):\n"
        "    raise ConfigError('too small.')\n"
        f"with get_parallel().override(dp_size=1, num_dp_ranks={num_replicas}):\n"
        "    hooks.Hooks(on_cpu=True).around_scheduler(original, None, None)\n"
    )
    process = zygotes.fork([str(script)], dict(os.environ), log)
    assert process.wait(120) == code
    sentence, _, rest = log.read_text().partition("\n")
    assert (sentence, bool(rest)) == ("sglang-tiered: too small.", code == 1)


def test_working_set_counts_one_copy_of_the_weights(tmp_path: Path) -> None:
    names = ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors")
    for name in (*names, "pytorch_model.bin", "training_args.bin"):
        (tmp_path / name).write_bytes(bytes(5000))
    copy = one_copy([*tmp_path.iterdir()])
    assert {file.name for file in copy} == {"model-1.safetensors", "model-2.safetensors"}


def test_token_bytes_equal_the_device_pools(tmp_path: Path) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    maker = ROOT / "scripts" / "make_demo_model.py"
    subprocess.run([sys.executable, maker, tmp_path / "model"], check=True, timeout=120)
    model = ModelConfig(str(tmp_path / "model"), dtype="float32")
    # Keys and values of 3 layers of 2 heads of 64 floats.
    assert memory.token_bytes(model, "auto") == 2 * 3 * 2 * 64 * 4
    assert memory.token_bytes(model, "fp8_e4m3") == 2 * 3 * 2 * 64


def test_unusable_gpu_is_not_replaced_by_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from sglang_tiered import launch_server
    from sglang_tiered.integration import plugin

    if accelerator.is_available():
        pytest.skip("torch can use the device of this machine")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(accelerator, "NVIDIA_CONTROL", tmp_path / "nvidiactl")
    assert accelerator.problem() is None
    (tmp_path / "nvidiactl").touch()
    sentence = accelerator.problem()
    assert sentence is not None and "cannot use a GPU" in sentence
    assert "CUDA_VISIBLE_DEVICES= to serve on the CPU" in sentence
    with pytest.raises(SystemExit, match="cannot use a GPU"):  # SGLang passes it on
        plugin.activate_platform()
    assert launch_server.main(["--model-path", "m"]) == 2
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert accelerator.problem() is None
