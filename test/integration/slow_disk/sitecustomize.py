"""Found on a server's PYTHONPATH: reads of the NVMe tier take as long as the file named by
``SLOW_DISK_FILE`` says, in seconds; no time where it is empty or absent. A second word there is a
part of the names of the shards whose reads fail."""

from __future__ import annotations

import contextlib
import errno
import importlib.abc
import os
import sys
import time
from typing import Any

MODULE = "sglang_tiered.storage.region.device"


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
            read = module.FileDevice.readv

            def slow_read(device: Any, *arguments: Any) -> int:
                delay_s, failing = 0.0, []
                name = os.environ.get("SLOW_DISK_FILE", "")
                with contextlib.suppress(OSError, ValueError), open(name) as file:
                    words = file.read().split()
                    delay_s, failing = float(words[0]) if words else 0.0, words[1:]
                time.sleep(delay_s)
                if any(part in device._directory.name for part in failing):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return int(read(device, *arguments))

            module.FileDevice.readv = slow_read

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _SlowDisk())
