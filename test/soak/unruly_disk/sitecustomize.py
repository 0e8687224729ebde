"""A disk that misbehaves on order, for servers started with this folder on ``PYTHONPATH``.

Python imports this module in every process of the server. ``UNRULY_DISK_FILE`` names a file of
JSON, read anew for each operation on files of the NVMe tier; none of it is a disk in order:

``read_s``        every read takes so long
``write_bytes_s`` every write takes as long as at this speed
``errno``         every write, and every new file, fails with this error, as with ``ENOSPC``
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = os.environ.get("UNRULY_DISK_FILE", "")
MODULE = "sglang_tiered.storage.region.device"
WRITES = ("create", "writev", "replace_file")


def orders() -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(Path(FILE).read_bytes())
        return found
    return {}


def slow_read(original: Callable[..., Any], *arguments: Any) -> Any:
    time.sleep(orders().get("read_s", 0.0))
    return original(*arguments)


def failing_write(original: Callable[..., Any], *arguments: Any) -> Any:
    told = orders()
    if "errno" in told:
        raise OSError(told["errno"], os.strerror(told["errno"]))
    written = original(*arguments)
    if "write_bytes_s" in told and isinstance(written, int):
        time.sleep(written / told["write_bytes_s"])
    return written


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments: around(original, *arguments))


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the device once its module was executed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: Any) -> None:
            execute(module)
            device = module.FileDevice
            wrap(device, "readv", slow_read)
            for write in WRITES:
                wrap(device, write, failing_write)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


if FILE:
    sys.meta_path.insert(0, _Finder())
