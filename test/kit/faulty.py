"""Faults on order, for tests: a decorator around a region ``Device``.

Deterministic: a fault names the operation it hits by number, or comes from a seed. Nothing sleeps;
to hold an operation, let a hook wait for an event of the test.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.region.format import BLOCK_BYTES

Operation = str
"""The name of one of the methods of ``Device``."""


def fail_once(patch: Any, place: Any, name: str, error: BaseException | None = None) -> list[Any]:
    """Have the next call raise. Returns what is still to be raised."""
    inner, left = getattr(place, name), [error or MemoryError()]

    def call(*arguments: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return inner(*arguments, **named)

    patch.setattr(place, name, call)
    return left


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to operation number ``at`` (from 0; counted over all when ``operation`` is
    None, else over that kind) and to the ``times - 1`` after it."""

    at: int
    operation: Operation | None = None
    times: int = 1
    error: int | None = None  # raise OSError with this errno, nothing done
    short_bytes: int | None = None  # readv, writev: move only the whole blocks of this many
    flip_bit: int | None = None  # readv: flip this bit of what was read

    def hits(self, operation: Operation, number: int, number_of_kind: int) -> bool:
        if self.operation is None:
            return self.at <= number < self.at + self.times
        return self.operation == operation and self.at <= number_of_kind < self.at + self.times


def _passed_on(operation: Operation) -> Any:
    def call(self: FaultyDevice, *given: Any, **named: Any) -> Any:
        self._enter(operation)
        return getattr(self.inner, operation)(*given, **named)

    return call


class FaultyDevice(FileDevice):
    """Passes every operation to ``inner``, unless a fault says otherwise.

    ``calls`` records every operation in order. ``before`` is called ahead of each, on the calling
    thread, and may block.
    """

    def __init__(
        self,
        inner: FileDevice,
        faults: Sequence[Fault] = (),
        *,
        seed: int = 0,
        failure_rate: float = 0.0,
        before: Callable[[Operation], None] | None = None,
    ) -> None:
        self.inner = inner
        self.faults = list(faults)
        self.failure_rate = failure_rate
        self.before = before
        self.calls: list[Operation] = []
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def _enter(self, operation: Operation) -> Fault | None:
        """Count the operation, raise what is due, return the fault that shapes its result."""
        with self._lock:
            number, of_kind = len(self.calls), self.calls.count(operation)
            self.calls.append(operation)
            unlucky = self._random.random() < self.failure_rate
            due = [fault for fault in self.faults if fault.hits(operation, number, of_kind)]
        if self.before is not None:
            self.before(operation)
        for code in [fault.error for fault in due] + [errno.EIO] * unlucky:
            if code is not None:
                raise OSError(code, os.strerror(code))
        return due[0] if due else None

    list_names = _passed_on("list_names")
    create = _passed_on("create")
    open = _passed_on("open")
    is_intact = _passed_on("is_intact")
    sync = _passed_on("sync")
    sync_directory = _passed_on("sync_directory")
    read_file = _passed_on("read_file")
    replace_file = _passed_on("replace_file")
    unlink = _passed_on("unlink")
    free_bytes = _passed_on("free_bytes")

    def readv(self, fd: int, segments: Sequence[memoryview], offset: int) -> int:
        fault = self._enter("readv")
        if fault is not None and fault.short_bytes is not None:
            segments = _leading(segments, fault.short_bytes)
        count = self.inner.readv(fd, segments, offset)
        if fault is not None and fault.flip_bit is not None:
            _flip(segments, fault.flip_bit)
        return count

    def writev(self, fd: int, segments: Sequence[memoryview], offset: int) -> int:
        fault = self._enter("writev")
        if fault is not None and fault.short_bytes is not None:
            segments = _leading(segments, fault.short_bytes)
        return self.inner.writev(fd, segments, offset)

    def file_bytes(self, name: str) -> int:
        return self.inner.file_bytes(name)

    def close(self, fd: int) -> None:
        self.inner.close(fd)


def _leading(segments: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    nbytes -= nbytes % BLOCK_BYTES
    leading = []
    for segment in segments:
        piece = segment[:nbytes]
        nbytes -= piece.nbytes
        leading.append(piece)
    return leading


def _flip(segments: Sequence[memoryview], bit: int) -> None:
    position = bit // 8 % sum(segment.nbytes for segment in segments)
    for segment in segments:
        if position < segment.nbytes:
            segment[position] ^= 1 << bit % 8
            return
        position -= segment.nbytes
