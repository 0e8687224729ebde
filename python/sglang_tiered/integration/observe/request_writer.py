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
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sglang_tiered.integration.observe.story import Story


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
        else:
            self._log.settle("write")

    def _append(self, data: bytes) -> None:
        """Write to the file that has the name now: others may have moved it."""
        with self._opened() as (descriptor, size):
            if not size or size + len(data) <= self._max_bytes:
                self._write_whole(descriptor, size, data)
                return
        os.rename(self._path, older(self._path))
        with self._opened() as (descriptor, size):
            self._write_whole(descriptor, size, data)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[int, int]]:
        """Open the file; yield its descriptor and size."""
        descriptor = open_log(self._path)
        try:
            yield descriptor, os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def _write_whole(self, descriptor: int, size: int, data: bytes) -> None:
        # Of a line that a killed process left half, so that the next one is whole. Not by its name,
        # which may be another file's, or a pipe's, by now.
        if size and os.pread(descriptor, 1, size - 1) not in (b"\n", b""):
            data = b"\n" + data
        view = memoryview(data)
        try:
            while view:
                view = view[self._write(descriptor, bytes(view)) :]
        except OSError:
            os.ftruncate(descriptor, size)  # no line is left half
            raise
