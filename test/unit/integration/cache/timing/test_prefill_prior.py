"""The probe's prior is of this machine, and absent weights leave the built-in one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_tiered.integration.cache import prefill_times as prefill_prior
from sglang_tiered.integration.cache.prefill_times import probe_prefill
from sglang_tiered.policy.cost_model import PRIOR_PREFILL


def probe(path: Path, num_ranks: int = 1) -> tuple[float, ...]:
    cost = probe_prefill(
        str(path), None, dtype=torch.float32, device="cpu", num_ranks=num_ranks, token_bytes=1
    )
    assert cost.num_observed == 0
    return cost.prices


def test_more_weights_make_a_token_cost_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Measured once: two measurements on a busy machine differ by more than the weights.
    rate = prefill_prior._operations_per_s(torch.float32, "cpu")
    assert rate is not None and rate > 0
    monkeypatch.setattr(prefill_prior, "_operations_per_s", lambda dtype, device: rate)
    small, large = tmp_path / "small", tmp_path / "large"
    for folder, size in ((small, 4 << 20), (large, 400 << 20)):
        folder.mkdir()
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(size)  # sparse: only the size counts
        (folder / "notes.txt").write_text("not a weight")
    cheap, dear = probe(small)[1], probe(large)[1]
    assert dear / cheap == pytest.approx(100)
    assert dear / probe(large, num_ranks=4)[1] == pytest.approx(4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_formats_of_a_checkpoint_make_no_token_dearer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """What it computes in is the pool's; its files may hold four bytes a weight, or half a byte."""
    monkeypatch.setattr(prefill_prior, "_operations_per_s", lambda dtype, device: 1e9)
    save_file({"w": torch.zeros(1 << 20, dtype=dtype)}, tmp_path / "model.safetensors")
    assert probe(tmp_path)[1] == pytest.approx(2 * (1 << 20) / 1e9)
    save_file({"w": torch.zeros(1 << 17, dtype=torch.int32)}, tmp_path / "model.safetensors")
    assert probe(tmp_path)[1] == pytest.approx(2 * (1 << 20) / 1e9)


def test_second_copy_of_weights_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_prior, "_operations_per_s", lambda dtype, device: 1e9)
    save_file({"w": torch.zeros(1 << 20)}, tmp_path / "model.safetensors")
    one = probe(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1 << 22))
    save_file({"w": torch.zeros(1 << 20)}, tmp_path / "consolidated.safetensors")
    assert probe(tmp_path) == one


@pytest.mark.parametrize("dtype", prefill_prior.PRODUCT_TYPES)
def test_probe_of_every_format_is_short(dtype: torch.dtype) -> None:
    """A plain product in float16 on a CPU took 10 s."""
    begun = time.process_time()
    rate = prefill_prior._operations_per_s(dtype, "cpu")
    assert rate is not None and rate > 1e8
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("operations_per_s", [1e6, 1e8, 1e10, 1e12])
def test_slow_format_bounds_probe_in_time(
    monkeypatch: pytest.MonkeyPatch, operations_per_s: float
) -> None:
    now = [0.0]

    def linear(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        now[0] += 2 * rows.shape[0] * weights.numel() / operations_per_s
        return rows

    monkeypatch.setattr(prefill_prior.F, "linear", linear)
    monkeypatch.setattr(prefill_prior.time, "perf_counter", lambda: now[0])
    rate = prefill_prior._operations_per_s(torch.float32, "cpu")
    assert rate == pytest.approx(operations_per_s)
    first = 2 * 16 * (1024**2 + 256**2) / operations_per_s
    assert now[0] <= max(prefill_prior.MAX_S, first) * 1.2


def test_without_weights_the_built_in_prior_stands(tmp_path: Path) -> None:
    assert probe(tmp_path) == PRIOR_PREFILL
    assert probe(tmp_path / "no-such-model") == PRIOR_PREFILL


def test_kv_in_eight_bits_is_probed_in_bfloat16(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * (1 << 20))
    arguments = {"device": "cpu", "num_ranks": 1, "token_bytes": 1}
    cost = probe_prefill(str(tmp_path), None, dtype=torch.float8_e4m3fn, **arguments)
    assert 0 < cost.prices[1] < 1e-3
