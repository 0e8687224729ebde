"""A disk of a chosen speed, for servers started with this folder on ``PYTHONPATH``.

Python imports this module in every process of the server. ``SLOW_DISK_BYTES_PER_S`` is the speed of
writing: every write then waits, after it was done, until a disk of that speed would have finished
it and what was written before it. It applies to the NVMe tier and to SGLang's ``file`` backend
alike. ``SLOW_DISK_FILE`` names a file that holds the speed instead, read anew for each write, so
that a disk can become slow and fast again; empty or 0 is no limit. ``SLOW_DISK_READ_FILE`` is the
same for reading; ``SLOW_DISK_READ_LOG`` names a file that gets a line per read: when it began, when
it ended (``time.monotonic``), and its bytes.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType


class _Pace:
    """One disk: what it is asked for is done in order, at the speed of the moment."""

    def __init__(self, speed: Callable[[], float]) -> None:
        self._speed = speed
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, num_bytes: int) -> float:
        """When that disk will have moved these bytes too, by ``time.monotonic``."""
        speed = self._speed()
        with self._lock:
            begun = max(self._free_at, time.monotonic())
            self._free_at = begun + (num_bytes / speed if speed > 0 else 0.0)
            return self._free_at

    @contextlib.contextmanager
    def reading(self, num_bytes: int) -> Iterator[None]:
        """The read within the block ends no sooner than that disk would have ended it."""
        begun = time.monotonic()
        free_at = self.take(num_bytes)
        yield
        time.sleep(max(0.0, free_at - time.monotonic()))
        _note_read(begun, num_bytes)

    def wrote(self, num_bytes: int) -> None:
        time.sleep(max(0.0, self.take(num_bytes) - time.monotonic()))


def _write_speed() -> float:
    name = os.environ.get("SLOW_DISK_FILE")
    if name is None:
        return float(os.environ.get("SLOW_DISK_BYTES_PER_S") or 0)
    return float(Path(name).read_text() or 0)


def _read_speed() -> float:
    name = os.environ.get("SLOW_DISK_READ_FILE")
    return 0.0 if name is None else float(Path(name).read_text() or 0)


def _note_read(begun_s: float, num_bytes: int) -> None:
    if name := os.environ.get("SLOW_DISK_READ_LOG"):
        line = f"{begun_s:.6f} {time.monotonic():.6f} {num_bytes}\n"
        # One write to a file opened for appending: lines of several threads do not mix.
        with open(name, "ab", buffering=0) as log:
            log.write(line.encode())


def _slow_down(module: ModuleType) -> None:
    writes, reads = _Pace(_write_speed), _Pace(_read_speed)
    if module.__name__.endswith(".device"):
        device = module.FileDevice
        writev, readv = device.writev, device.readv

        def slow_writev(self: Any, fd: int, segments: Any, offset: int) -> int:
            count: int = writev(self, fd, segments, offset)
            writes.wrote(count)
            return count

        def slow_readv(self: Any, fd: int, segments: Any, offset: int) -> int:
            with reads.reading(sum(segment.nbytes for segment in segments)):
                count: int = readv(self, fd, segments, offset)
            return count

        device.writev, device.readv = slow_writev, slow_readv
        return
    backend = module.HiCacheFile
    store, load = backend.set, backend.get

    def slow_set(self: Any, key: str, value: Any = None, *args: Any, **kwargs: Any) -> bool:
        is_new = not self.exists(key)
        ok: bool = store(self, key, value, *args, **kwargs)
        if ok and is_new:
            writes.wrote(value.numel() * value.element_size())
        return ok

    def slow_get(self: Any, key: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        with reads.reading(target.numel() * target.element_size()):
            return load(self, key, target, *args, **kwargs)

    backend.set, backend.get = slow_set, slow_get


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


NAMES = ("SLOW_DISK_FILE", "SLOW_DISK_BYTES_PER_S", "SLOW_DISK_READ_FILE")
if any(name in os.environ for name in NAMES):
    sys.meta_path.insert(0, _Finder())
