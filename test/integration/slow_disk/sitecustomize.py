"""Found on a server's PYTHONPATH: makes the disks of NVMe tiers slow, as two files say.

``SLOW_DISK_FILE`` names the one of reads. It holds the seconds that each takes, a disk's bytes per
second (0: no limit), and parts of the names of shards whose reads fail. The file that
``SLOW_DISK_WRITE_FILE`` names is the speed of writing. Nothing is slow where they are absent."""

from __future__ import annotations

import contextlib
import errno
import importlib.abc
import os
import sys
import threading
import time
from typing import Any

MODULE = "sglang_tiered.storage.region.device"


def _words(variable: str) -> list[str]:
    with contextlib.suppress(OSError), open(os.environ.get(variable, "")) as file:
        return file.read().split()
    return []


class _SlowDisk(importlib.abc.MetaPathFinder):
    """Wraps the device's read once its module is loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: Any) -> None:
            execute(module)
            read, write = module.FileDevice.readv, module.FileDevice.writev
            one_at_a_time = threading.Lock()

            def take(count: int, bytes_per_s: str) -> int:
                if float(bytes_per_s) > 0:
                    with one_at_a_time:
                        time.sleep(count / float(bytes_per_s))
                return count

            def slow_read(device: Any, *arguments: Any) -> int:
                delay_s, bytes_per_s, *failing = _words("SLOW_DISK_FILE") or ["0", "0"]
                time.sleep(float(delay_s))
                if any(part in device._directory.name for part in failing):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return take(int(read(device, *arguments)), bytes_per_s)

            def slow_write(device: Any, *arguments: Any) -> int:
                (bytes_per_s,) = _words("SLOW_DISK_WRITE_FILE") or ["0"]
                return take(int(write(device, *arguments)), bytes_per_s)

            module.FileDevice.readv, module.FileDevice.writev = slow_read, slow_write

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _SlowDisk())
