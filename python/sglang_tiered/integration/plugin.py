"""Entry points that SGLang runs in every process it starts.

``sglang.srt.platforms`` -> ``activate_platform``; ``sglang.srt.plugins`` -> ``register``. SGLang
logs and swallows an error in either, so the launcher checks first whatever must stop a launch
(``compat``), and it is checked again here. A failure here leaves the ``tiered`` names unregistered:
``--radix-cache-backend tiered`` then fails at start instead of running unchecked.
"""

from __future__ import annotations

import multiprocessing
import os
import signal


def activate_platform() -> str | None:
    """Return the reference CPU platform on a machine without an accelerator, the native one where
    there is CUDA and no ``sgl_kernel``, None (SGLang's choice) on others.

    A GPU that torch cannot use ends the process with one sentence: SGLang without a platform ends
    too, at a place that differs by version.
    """
    from sglang_tiered.integration.cpu import processes
    from sglang_tiered.integration.launch import accelerator

    if accelerator.lacks_kernels():
        from sglang_tiered.integration.cuda_native import platform as native_platform

        native_platform.hide_cuda()
        processes.declare_torchvision_operators()
        return "sglang_tiered.integration.cuda_native.platform.NativeCudaPlatform"
    if accelerator.is_available():
        return None
    problem = accelerator.problem()
    if problem is not None:
        raise SystemExit(f"sglang-tiered: {problem}")

    processes.declare_torchvision_operators()
    return "sglang_tiered.integration.cpu.platform.ReferenceCpuPlatform"


def register() -> None:
    """Register the ``tiered`` cache, the attention backends and the hooks."""
    _leave_interrupts_to_the_launcher()
    from sglang_tiered.integration import compat, hooks
    from sglang_tiered.integration.attention import registration
    from sglang_tiered.integration.cache import factory
    from sglang_tiered.integration.launch import accelerator

    compat.check_version()
    registration.register()
    if not accelerator.is_available():
        from sglang_tiered.integration.cpu import platform as cpu_platform
        from sglang_tiered.integration.cpu import processes, short_conv

        # This feature asks torch for a CUDA event, and ends the scheduler where there is none.
        os.environ.setdefault("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")
        processes.keep_freed_memory()
        cpu_platform.patch_host_pools()
        short_conv.register()
    elif accelerator.lacks_kernels():
        from sglang_tiered.integration.cuda_native import platform as native_platform

        native_platform.prepare()
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
