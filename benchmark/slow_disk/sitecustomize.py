"""A disk of a chosen writing speed, for servers started with this folder on ``PYTHONPATH``.

Python imports this module in every process of the server. ``SLOW_DISK_BYTES_PER_S`` is the speed:
every write then waits, after it was done, until a disk of that speed would have finished it and
what was written before it. Reads are not touched. It applies to the NVMe tier and to SGLang's
``file`` backend alike. ``SLOW_DISK_FILE`` names a file that holds the speed instead, read anew for
each write, so that a disk can become slow and fast again; empty or 0 is no limit.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


class _Pace:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wrote(self, num_bytes: int) -> None:
        speed = _speed()
        if speed <= 0:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + num_bytes / speed
            free_at = self._free_at
        time.sleep(max(0.0, free_at - time.monotonic()))


def _speed() -> float:
    name = os.environ.get("SLOW_DISK_FILE")
    if name is None:
        return float(os.environ.get("SLOW_DISK_BYTES_PER_S") or 0)
    return float(Path(name).read_text() or 0)


def _slow_down(module: ModuleType) -> None:
    pace = _Pace()
    if module.__name__.endswith(".device"):
        device = module.FileDevice
        writev = device.writev

        def slow_writev(self: Any, fd: int, segments: Any, offset: int) -> int:
            count: int = writev(self, fd, segments, offset)
            pace.wrote(count)
            return count

        device.writev = slow_writev
        return
    backend = module.HiCacheFile
    store = backend.set

    def slow_set(self: Any, key: str, value: Any = None, *args: Any, **kwargs: Any) -> bool:
        is_new = not self.exists(key)
        ok: bool = store(self, key, value, *args, **kwargs)
        if ok and is_new:
            pace.wrote(value.numel() * value.element_size())
        return ok

    backend.set = slow_set


class _Finder(importlib.abc.MetaPathFinder):
    """Slows the two modules down right after they were executed."""

    targets = ("sglang_tiered.storage.region.device", "sglang.srt.mem_cache.hicache_storage")

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self.targets:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_slow_down(module: ModuleType) -> None:
            execute(module)
            _slow_down(module)

        spec.loader.exec_module = execute_and_slow_down  # type: ignore[method-assign]
        return spec


if "SLOW_DISK_FILE" in os.environ or "SLOW_DISK_BYTES_PER_S" in os.environ:
    sys.meta_path.insert(0, _Finder())
