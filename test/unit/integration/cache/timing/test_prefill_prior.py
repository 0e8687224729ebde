"""The probe's prior is of this machine, and absent weights leave the built-in one."""

from __future__ import annotations

from pathlib import Path

import torch

from sglang_tiered.integration.cache.prefill_times import probe_prefill
from sglang_tiered.policy.cost_model import PRIOR_PREFILL


def probe(path: Path, num_ranks: int = 1) -> tuple[float, ...]:
    cost = probe_prefill(
        str(path), None, dtype=torch.float32, device="cpu", num_ranks=num_ranks, token_bytes=1
    )
    assert cost.num_observed == 0
    return cost.prices[:3]


def test_without_weights_the_built_in_prior_stands(tmp_path: Path) -> None:
    assert probe(tmp_path) == PRIOR_PREFILL
    assert probe(tmp_path / "no-such-model") == PRIOR_PREFILL
