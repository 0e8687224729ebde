"""Found on a server's PYTHONPATH: has the disk of its NVMe tier behave as the JSON of the file says
that ``SLOW_DISK_FILE`` names, read anew for each operation. Nothing in it is a disk in order.

``read_s``                           every read takes so long
``read_bytes_s``, ``write_bytes_s``  the disk's speed
``failing``                          parts of the names of shards whose reads fail
``errno``                            every write, and every new file, fails with this error"""

from __future__ import annotations

import contextlib
import errno
import importlib.abc
import json
import os
import sys
import threading
import time
from typing import Any

MODULE = "sglang_tiered.storage.region.device"
_one_at_a_time = threading.Lock()


def _orders() -> dict[str, Any]:
    with (
        contextlib.suppress(OSError, ValueError),
        open(os.environ.get("SLOW_DISK_FILE", "")) as file,
    ):
        found: dict[str, Any] = json.load(file)
        return found
    return {}


def _paced(num_bytes: int, bytes_per_s: float) -> int:
    if bytes_per_s:
        with _one_at_a_time:
            time.sleep(num_bytes / bytes_per_s)
    return num_bytes


def _slow_down(device: Any) -> None:
    readv = device.readv

    def slow_readv(self: Any, *arguments: Any) -> int:
        told = _orders()
        time.sleep(told.get("read_s", 0.0))
        if any(part in self._directory.name for part in told.get("failing", ())):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return _paced(readv(self, *arguments), told.get("read_bytes_s", 0.0))

    device.readv = slow_readv
    for name in ("create", "writev", "replace_file"):
        setattr(device, name, _slow_write(getattr(device, name)))


def _slow_write(original: Any) -> Any:
    def slow_write(*arguments: Any) -> Any:
        told = _orders()
        if "errno" in told:
            raise OSError(told["errno"], os.strerror(told["errno"]))
        moved = original(*arguments)
        return _paced(moved, told.get("write_bytes_s", 0.0)) if isinstance(moved, int) else moved

    return slow_write


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the device once its module is loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: Any) -> None:
            execute(module)
            _slow_down(module.FileDevice)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
