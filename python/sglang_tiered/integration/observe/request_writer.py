"""``LineWriter``: writes the lines of requests to a file on a thread of its own.

The scheduler hands over what it knows of a request and goes on; what the thread cannot take is
dropped and counted. So is what the disk refuses: nothing is tried twice, a line is whole or absent,
and the next one is written as soon as the disk takes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered.integration.observe.story import finish
from sglang_tiered.request_log import older, open_log
from sglang_tiered.storage.backoff import OnceLog

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sglang_tiered.integration.observe.story import Story

__all__ = ["LineWriter"]

MAX_QUEUED = 4096
"""Requests that wait for the thread, of about 2 kB each."""

MAX_BATCH = 256
"""Lines of one write."""

CLOSE_S = 5.0

logger = logging.getLogger(__name__)


class LineWriter:
    """Adds lines to ``path``, which is renamed when it would outgrow ``max_bytes``. ``put`` and
    ``num_dropped`` are for one other thread. ``write`` is the system's."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        replica: int = 0,
        max_queued: int = MAX_QUEUED,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._replica = replica
        self._max_queued = max_queued
        self._write = write
        self._queue: queue.SimpleQueue[Story | None] = queue.SimpleQueue()
        self._descriptor: int | None = None
        self._log = OnceLog(logger)
        self._encoder = msgspec.json.Encoder()
        self._num_refused = 0  # as the queue was full
        self._num_lost = 0  # as the file could not be written
        self._thread = threading.Thread(target=self._run, name="tier-request-log", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Return how many lines were lost so far."""
        return self._num_refused + self._num_lost

    def put(self, story: Story) -> None:
        """Have a line written, unless too many wait for that. Never waits."""
        if self._queue.qsize() < self._max_queued:
            self._queue.put(story)
        else:
            self._num_refused += 1

    def close(self) -> None:
        """Write what waits, for a few seconds at most."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    # ---- The thread ----

    def _run(self) -> None:
        is_over = False
        while not is_over:
            ended = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while len(ended) < MAX_BATCH:
                    ended.append(self._queue.get_nowait())
            is_over = None in ended
            lines = [line for each in ended if each is not None and (line := self._line(each))]
            if lines:
                self._add(lines)
        self._let_go()

    def _line(self, story: Story) -> bytes:
        try:
            return self._encoder.encode(finish(story, replica=self._replica)) + b"\n"
        except Exception:
            self._num_lost += 1
            self._log.fault("line", "internal error in the line of a request, which is dropped")
            return b""

    def _add(self, lines: list[bytes]) -> None:
        try:
            self._append(b"".join(lines))
        except OSError as error:
            self._num_lost += len(lines)
            self._log.report(
                "write",
                "--tier-log-requests: %s cannot be written (%s); lines of requests are dropped and "
                "counted until it can",
                self._path,
                error.strerror or error,
            )
            self._let_go()
        else:
            self._log.settle("write")

    def _append(self, data: bytes) -> None:
        descriptor = self._open()
        size = os.fstat(descriptor).st_size
        if size and size + len(data) > self._max_bytes:
            os.rename(self._path, older(self._path))
            self._let_go()
            descriptor, size = self._open(), 0
        try:
            self._write_all(descriptor, data)
        except OSError:
            os.ftruncate(descriptor, size)  # no line is left half
            raise

    def _write_all(self, descriptor: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._write(descriptor, bytes(view)) :]

    def _open(self) -> int:
        """Return the descriptor of the file that has the name now: others may have moved it."""
        if self._descriptor is not None:
            mine = os.fstat(self._descriptor)
            with contextlib.suppress(OSError):
                named = os.stat(self._path, follow_symlinks=False)
                if (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino):
                    return self._descriptor
            self._let_go()
        descriptor = open_log(self._path)
        self._descriptor = descriptor
        self._end_half_line(descriptor)
        return descriptor

    def _end_half_line(self, descriptor: int) -> None:
        """Close a line that a killed process left half, so that the next one is whole."""
        size = os.fstat(descriptor).st_size
        # Not by its name, which may be another file's, or a pipe's, by now.
        if size and os.pread(descriptor, 1, size - 1) not in (b"\n", b""):
            self._write_all(descriptor, b"\n")

    def _let_go(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None
