"""Whether this machine has a device that torch can use, and whether it has one that torch cannot.

A GPU whose driver is too old for the installed torch looks to torch like no GPU at all. Serving on
the CPU would then be thousands of times slower than expected, without an explanation.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

NVIDIA_CONTROL = Path("/dev/nvidiactl")
"""This file exists wherever an NVIDIA driver is loaded, in containers too."""


def is_available() -> bool:
    """Whether torch sees an accelerator. The CPU platform of this package yields to any."""
    import torch

    return torch.accelerator.is_available()


def lacks_kernels() -> bool:
    """Whether torch sees CUDA, and SGLang's compiled kernels (``sgl_kernel``) are not installed."""
    import torch

    is_cuda = torch.cuda.is_available() and torch.version.hip is None
    return is_cuda and importlib.util.find_spec("sgl_kernel") is None


def problem() -> str | None:
    """Return one sentence if the machine has an NVIDIA driver that torch cannot use. None where the
    device works, where no driver is loaded, and where ``CUDA_VISIBLE_DEVICES`` hides all devices
    (it is empty, or begins with a number below 0)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and (not visible.strip() or visible.strip().startswith("-"))
    if hidden or not NVIDIA_CONTROL.exists():
        return None
    if is_available():
        return None
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "it reports no device"
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].rstrip(". ")
    return (
        f"this machine has an NVIDIA driver, but torch {torch.__version__} cannot use a GPU "
        f"({reason}); update the driver, install a torch that fits it, or set "
        "CUDA_VISIBLE_DEVICES= to serve on the CPU."
    )
