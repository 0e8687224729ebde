"""Entry points that SGLang runs in every process it starts.

``sglang.srt.platforms`` -> ``activate_platform``; ``sglang.srt.plugins`` -> ``register``. SGLang
logs and swallows an error in either, so the launcher checks first whatever must stop a launch
(``compat``), and it is checked again here. A failure here leaves the ``tiered`` names unregistered:
``--radix-cache-backend tiered`` then fails at start instead of running unchecked.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
from pathlib import Path

NVIDIA_CONTROL = Path("/dev/nvidiactl")
"""This file exists wherever an NVIDIA driver is loaded, in containers too."""


def activate_platform() -> str | None:
    """Return the reference CPU platform on a machine without an accelerator, the native one where
    there is CUDA and no ``sgl_kernel``, None (SGLang's choice) on others.

    A GPU that torch cannot use ends the process with one sentence: SGLang without a platform ends
    too, at a place that differs by version.
    """
    from sglang_tiered.integration.platforms import processes

    if lacks_kernels():
        from sglang_tiered.integration.platforms import cuda_native

        cuda_native.hide_cuda()
        processes.declare_torchvision_operators()
        return "sglang_tiered.integration.platforms.cuda_native.NativeCudaPlatform"
    if has_accelerator():
        return None
    problem = accelerator_problem()
    if problem is not None:
        raise SystemExit(f"sglang-tiered: {problem}")

    processes.declare_torchvision_operators()
    return "sglang_tiered.integration.platforms.cpu.ReferenceCpuPlatform"


def register() -> None:
    """Register the ``tiered`` cache, the attention backends and the hooks."""
    _leave_interrupts_to_the_launcher()
    from sglang_tiered.integration import compat, hooks
    from sglang_tiered.integration.attention import registration
    from sglang_tiered.integration.cache import factory

    compat.check_version()
    registration.register()
    if not has_accelerator():
        from sglang_tiered.integration.platforms import cpu, processes, short_conv

        # This feature asks torch for a CUDA event, and ends the scheduler where there is none.
        os.environ.setdefault("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")
        processes.keep_freed_memory()
        cpu.patch_host_pools()
        short_conv.register()
    elif lacks_kernels():
        from sglang_tiered.integration.platforms import cuda_native

        cuda_native.prepare()
    compat.check_signatures()
    factory.register(hooks.register().build_cache)


def _leave_interrupts_to_the_launcher() -> None:
    """A Ctrl-C reaches every process of a terminal. The one that started SGLang's ends them; what
    they would print of it, tracebacks and a library's report on leaks, hides a clean end.

    A process of the user's that holds an engine is not SGLang's, and stays one that can be ended.
    """
    target = getattr(multiprocessing.current_process(), "_target", None)
    if (getattr(target, "__module__", None) or "").startswith("sglang."):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


# ---- The device ----


def has_accelerator() -> bool:
    """Whether torch sees an accelerator. The CPU platform of this package yields to any."""
    import torch

    return torch.accelerator.is_available()


def lacks_kernels() -> bool:
    """Whether torch sees CUDA, and SGLang's compiled kernels (``sgl_kernel``) are not installed."""
    import torch

    is_cuda = torch.cuda.is_available() and torch.version.hip is None
    return is_cuda and importlib.util.find_spec("sgl_kernel") is None


def accelerator_problem() -> str | None:
    """Return one sentence if the machine has an NVIDIA driver that torch cannot use, and so would
    serve on its CPU, thousands of times slower than expected. None also where
    ``CUDA_VISIBLE_DEVICES`` hides all devices (it is empty, or begins below 0)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and (not visible.strip() or visible.strip().startswith("-"))
    if hidden or not NVIDIA_CONTROL.exists():
        return None
    if has_accelerator():
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
