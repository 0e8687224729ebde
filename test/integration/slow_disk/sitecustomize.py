"""Found on a server's PYTHONPATH: reads of the NVMe tier take as long as the file named by
``SLOW_DISK_FILE`` says, in seconds; no time where it is empty or absent. A second word there is a
part of the names of the shards whose reads fail. The file named by ``SLOW_DISK_WRITE_FILE`` is the
speed of writing, in bytes per second."""

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

            def slow_read(device: Any, *arguments: Any) -> int:
                delay_s, *failing = _words("SLOW_DISK_FILE") or ["0"]
                time.sleep(float(delay_s))
                if any(part in device._directory.name for part in failing):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return int(read(device, *arguments))

            def slow_write(device: Any, *arguments: Any) -> int:
                count = int(write(device, *arguments))
                (bytes_per_s,) = map(float, _words("SLOW_DISK_WRITE_FILE") or ["0"])
                if bytes_per_s > 0:
                    with one_at_a_time:
                        time.sleep(count / bytes_per_s)
                return count

            module.FileDevice.readv, module.FileDevice.writev = slow_read, slow_write

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _SlowDisk())
