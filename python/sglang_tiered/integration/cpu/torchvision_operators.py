"""Lets ``import torchvision`` succeed where its compiled operators do not load.

They fail to load beside a CPU build of torch, and load beside its CUDA build, even without a GPU.
SGLang needs only ``torchvision.transforms``, so declaring the operators that torchvision looks up
at its import is enough. This module imports nothing of SGLang, because it must run before
``import sglang``.
"""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

# torch.library objects undo their definitions when collected, so they live as long as the process.
_libraries: list[Any] = []


def declare() -> None:
    """Declare ``torchvision::nms`` and ``torchvision::qnms`` unless they exist. Idempotent."""
    if _libraries:
        return
    # Load torchvision's own definitions first: after these they would end the process.
    found = importlib.util.find_spec("torchvision")
    for folder in (found and found.submodule_search_locations) or ():
        for path in Path(folder).glob("_C*.so"):
            with contextlib.suppress(ImportError, OSError):
                torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    if hasattr(torch.ops.torchvision, "nms"):
        return
    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
