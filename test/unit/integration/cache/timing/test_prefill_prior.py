"""The probe's prior is of this machine, and absent weights leave the built-in one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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


def test_without_weights_the_built_in_prior_stands(tmp_path: Path) -> None:
    assert probe(tmp_path) == PRIOR_PREFILL
    assert probe(tmp_path / "no-such-model") == PRIOR_PREFILL
