"""No figure without equal results: everybody against a float64 reference, then against us."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_tiered_kernels.pod_attention import reference_pod_attention

if TYPE_CHECKING:
    from pod_bench.batch import Batch
    from pod_bench.contenders import Output


# Relative to the norm of the expected values. Rounding of 16-bit inputs, weights and results stays
# below half of it; one wrong key in a row of 200 is above.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


class DifferentResultsError(Exception):
    """Somebody computes something else, so no quotient of times means anything."""


def error_of(batch: Batch, actual: Output, expected: torch.Tensor) -> float:
    """The larger of the prefill rows' and the decode rows' relative errors. NaN counts as inf."""
    first = batch.num_prefill_tokens
    parts = (actual[:first], actual[first:]) if isinstance(actual, torch.Tensor) else actual
    errors = [
        (part.double() - whole.double()).norm() / whole.double().norm()
        for part, whole in zip(parts, (expected[:first], expected[first:]), strict=True)
    ]
    worst = torch.stack(errors).nan_to_num(nan=float("inf")).max()
    return float(worst)


def check_against(batch: Batch, name: str, actual: Output, expected: torch.Tensor) -> float:
    """The error, or ``DifferentResultsError`` with one sentence where it is too large."""
    error = error_of(batch, actual, expected)
    allowed = TOLERANCE[batch.q.dtype]
    if error > allowed:
        raise DifferentResultsError(
            f"{name} differs on {batch.mix.name} by {error:.2g} of the norm, {allowed:g} allowed."
        )
    return error


def check_against_reference(batch: Batch, name: str, actual: Output) -> float:
    expected = reference_pod_attention(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.kv_indptr,
        batch.kv_indices,
        batch.mix.extend_lens,
        batch.mix.prefix_lens,
        sm_scale=batch.sm_scale,
    )
    return check_against(batch, name, actual, expected)
