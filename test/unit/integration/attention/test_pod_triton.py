"""The ``pod`` backend of CUDA beside the Triton backend it extends, in Triton's interpreter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import interpreted

pytestmark = pytest.mark.slow  # half a minute, most of it for importing SGLang once more

WORLDS = Path(__file__).resolve().parents[3] / "integration"


@interpreted(timeout_s=270)  # the first call imports SGLang
def check(**options: Any) -> None:
    sys.path.append(str(WORLDS))  # the interpreter's process has no settings of pytest
    from triton_world import compare

    compare(**options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sinks": True, "logit_cap": 2.0},
        {"window": 12},
        {"window": 12, "own_window_pool": True, "sinks": True},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_mixed_batches_alone_are_taken_and_equal_stock(options: dict[str, Any]) -> None:
    check(**options)


def test_fp8_pool_is_scaled_as_stored() -> None:
    check(dtype=torch.float8_e4m3fn, scales=(0.5, 2.0))


def test_parent_gets_slots_of_layers_left_to_it() -> None:
    check(left=True)


@pytest.mark.parametrize("options", [{}, {"window": 12, "sinks": True}, {"left": True}], ids=str)
def test_mixed_batches_over_flash_attention_equal_stock(options: dict[str, Any]) -> None:
    check(parent="fa3", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"logit_cap": 2.0},
        {"window": 12},
        {"window": 12, "own_window_pool": True},
        {"paged": True, "dtype": torch.float8_e4m3fn, "scales": (0.5, 2.0)},
        {"left": True},
    ],
    ids=" ".join,
)
def test_mixed_batches_over_flashinfer_equal_stock(options: dict[str, Any]) -> None:
    check(parent="flashinfer", **options)
