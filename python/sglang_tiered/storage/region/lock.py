"""One process per directory: an advisory lock that the kernel drops when its holder dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from typing import TYPE_CHECKING

from sglang_tiered.errors import StoreError, StoreLockedError
from sglang_tiered.storage.region.files import LOCK_NAME

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

__all__ = ["DirectoryLock"]

_POLL_S = 0.05


class DirectoryLock:
    """Holds ``path/LOCK`` from construction until ``release``; usable as a context manager.

    ``timeout_s`` waits that long for the present holder, such as a server that is shutting down.
    Raises ``StoreLockedError`` when the time is up and ``StoreError`` when the lock file cannot
    be made. The file itself stays: unlinking it would let two processes hold different ones.
    """

    def __init__(
        self, path: Path, *, timeout_s: float = 0.0, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._path = path
        file = path / LOCK_NAME
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd: int | None = os.open(file, flags, 0o600)
        except OSError as error:
            raise StoreError(
                f"the lock {file} cannot be opened ({error.strerror}); "
                "make the directory writable or pass another --tier-dir"
            ) from error
        try:
            self._acquire(self._fd, time.monotonic() + timeout_s, sleep)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            # The pid only serves the message of others; a full disk must not keep the lock away.
            if error.errno != errno.ENOSPC:
                self.release()
                raise StoreError(
                    f"the lock {file} cannot be taken ({error.strerror}); "
                    "pass a --tier-dir on a local filesystem"
                ) from error
        except StoreLockedError:
            self.release()
            raise

    def _acquire(self, fd: int, deadline: float, sleep: Callable[[float], None]) -> None:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                    raise StoreLockedError(
                        f"{self._path} is in use by process {holder}; "
                        "stop it or pass another --tier-dir"
                    ) from None
            sleep(_POLL_S)

    def release(self) -> None:
        """Let the next process in. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
