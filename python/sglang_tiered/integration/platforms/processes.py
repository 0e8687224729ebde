"""Processes of a server on a CPU: how SGLang's are started, as forks of the launcher, that they
keep freed memory, and that torchvision can be imported. All this comes before SGLang's import.

SGLang spawns them, since CUDA does not survive a fork, and each imports SGLang again: over half of
the processor time of a start. Only the launcher forks, while it has no other thread: a lock that
one held would stay locked in the fork. An engine in a user's process, and what a fork starts, are
spawned as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import multiprocessing
import os
import signal
import threading
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


_PR_SET_PDEATHSIG = 1
_forking_pid = 0

# torch.library objects undo their definitions when collected, so they live as long as the process.
_libraries: list[Any] = []


# Parameters of mallopt(3).
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

KEPT_BYTES = 256 << 20  # free memory at the end of the heap that stays with the process
MAX_HEAP_BLOCK_BYTES = 32 << 20  # glibc's own upper bound; larger blocks are mapped one by one


def fork_from_here(device: str) -> None:
    """SGLang's processes may be forks of this one, on a CPU. On other devices what it forks itself
    stays as it is. Called by the launcher, before SGLang starts."""
    if device != "cpu":
        return
    global _forking_pid  # noqa: PLW0603 - a hook has no other way to know
    _forking_pid = os.getpid()
    util.register_after_fork(multiprocessing, _be_as_spawned)


def around_start(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Hook around what starts schedulers and detokenizers."""
    if _forking_pid != os.getpid() or threading.active_count() > 1:
        return original(*args, **kwargs)
    # Python drops what is raised in the functions that run around a fork, and so a Ctrl-C.
    interrupts: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    # A spawn would start the launcher's, which its processes share; each fork would have its own.
    resource_tracker.ensure_running()
    multiprocessing.set_start_method("fork", force=True)
    try:
        return original(*args, **kwargs)
    finally:
        multiprocessing.set_start_method("spawn", force=True)  # which SGLang had chosen
        signal.signal(signal.SIGINT, handler)
        for number in interrupts[:1]:
            signal.raise_signal(number)


def _be_as_spawned(_: object) -> None:
    """Signals, exit handlers and start method as a spawned process of SGLang's has them. Interrupts
    are left to the launcher, as ``plugin`` does where a process loads plugins of its own. None
    outlives a launcher that has ended since: SGLang's own order to end with it comes later."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != _forking_pid:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    atexit._clear()  # noqa: SLF001 - the launcher's
    util.Finalize(None, atexit._run_exitfuncs, exitpriority=-1)  # noqa: SLF001
    multiprocessing.set_start_method("spawn", force=True)


def keep_freed_memory() -> bool:
    """Keep the memory that a forward pass frees in this process. Returns whether its C library has
    the thresholds for that.

    A prefill allocates and frees megabytes per layer. glibc returns freed blocks to the kernel once
    they pass thresholds that it adjusts by itself, depending on what else the process has freed.
    One server kept its memory, and the next, with the same model, took 14,000 page faults (40 ms of
    a prefill of 1,536 tokens) per request. With the thresholds set, it took 40.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    is_mapped_late: int = mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BLOCK_BYTES)
    is_kept: int = mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    return bool(is_mapped_late and is_kept)


def declare_torchvision_operators() -> None:
    """Declare ``torchvision::nms`` and ``torchvision::qnms`` unless they exist. Idempotent.

    Torchvision's compiled operators fail to load beside a CPU build of torch, and load beside its
    CUDA build, even without a GPU. SGLang needs only ``torchvision.transforms``, so declaring what
    torchvision looks up at its import is enough.
    """
    import torch

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
