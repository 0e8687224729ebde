"""The format a model computes in on a CPU where nobody chose one.

SGLang makes float16 of a float32 checkpoint, since GPUs compute fast in it. CPUs do not, or have no
instructions for it. A product of 512 rows ran at 8 to 9 billion operations a second in float16, 30
in float32 and 90 to 105 in bfloat16. (Two-core AMD EPYC VM with AVX-512 BF16, busy, 2026-11-26.)
With the instructions of older processors bfloat16 was no slower than float16. It takes as little
memory. A checkpoint in float16, or ``--dtype``, stays what it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["around_dtype"]


def around_dtype(original: Callable[..., torch.dtype], config: Any, dtype: Any) -> torch.dtype:
    """Return what SGLang chooses for a checkpoint's configuration, but bfloat16 where it makes
    float16 of float32 by itself."""
    chosen = original(config, dtype)
    if chosen is torch.float16 and str(dtype).lower() == "auto" and not _holds_float16(config):
        return torch.bfloat16
    return chosen


def _holds_float16(config: Any) -> bool:
    values = config if isinstance(config, dict) else vars(config)
    found = values.get("dtype") or values.get("torch_dtype")
    return str(found).rpartition(".")[2] in ("float16", "half")
