"""On a CPU a float32 checkpoint becomes bfloat16, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.configs import model_config
from transformers import PretrainedConfig

from sglang_tiered.integration.cpu.number_format import around_dtype

SGLANGS = getattr(model_config._get_and_verify_dtype, "__wrapped__", None)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("checkpoint", "asked", "chosen"),
    [
        (F32, "auto", BF16),
        (None, "auto", BF16),
        (F16, "auto", F16),
        (BF16, "auto", BF16),
        (F32, "half", F16),
        (F32, "float16", F16),
        (F32, "float32", F32),
        (F16, "float32", F32),
    ],
)
@pytest.mark.parametrize("as_dict", [False, True])
def test_float32_checkpoint_never_becomes_slow_float16(
    checkpoint: torch.dtype | None, asked: str, chosen: torch.dtype, as_dict: bool
) -> None:
    original = SGLANGS or model_config._get_and_verify_dtype
    config: Any = PretrainedConfig(dtype=checkpoint)
    if as_dict:
        name = None if checkpoint is None else str(checkpoint).removeprefix("torch.")
        config = {"dtype": name}
    assert around_dtype(original, config, asked) is chosen


def test_sglang_itself_still_makes_float16() -> None:
    """If it no longer does, the hook is superfluous."""
    original = SGLANGS or model_config._get_and_verify_dtype
    assert original({"dtype": "float32"}, "auto") is F16
