"""Tells the kernel the name of every Python thread, for servers started with this folder on
``PYTHONPATH``; Python does so itself from 3.14 on. What Python calls ``Thread-3 (backup)`` is
called ``backup``."""

from __future__ import annotations

import contextlib
import re
import threading
from pathlib import Path

MAX_BYTES = 15  # of a name, in the kernel
_UNNAMED = re.compile(r"Thread-\d+ \((.*)\)")
_start = threading.Thread.start


def _start_named(thread: threading.Thread) -> None:
    _start(thread)
    unnamed = _UNNAMED.fullmatch(thread.name)
    name = (unnamed[1] if unnamed else thread.name).encode()[:MAX_BYTES]
    with contextlib.suppress(OSError):  # it has ended already
        Path(f"/proc/self/task/{thread.native_id}/comm").write_bytes(name)


threading.Thread.start = _start_named  # type: ignore[method-assign]
