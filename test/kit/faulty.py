"""Faults on order, for tests: decorators around a region ``Device`` and around any engine.

Deterministic: a fault names the operation it hits by number, or comes from a seed. Nothing sleeps;
to hold an operation, let a hook wait for an event of the test.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sglang_tiered.storage.base import Job, JobKind, Reason, TierEngine
from sglang_tiered.storage.region.device import Device
from sglang_tiered.storage.region.format import BLOCK_BYTES

if TYPE_CHECKING:
    from sglang_tiered.storage.base import Erasure, LookupResult, Run, TenantUsage, TierStats

__all__ = ["Fault", "FaultyDevice", "FaultyEngine", "fail_once"]

Operation = Literal[
    "list_names",
    "create",
    "open",
    "is_intact",
    "readv",
    "writev",
    "sync",
    "sync_directory",
    "read_file",
    "replace_file",
    "unlink",
    "free_bytes",
]


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


class FaultyDevice(Device):
    """Passes every operation to ``inner``, unless a fault says otherwise.

    ``calls`` records every operation in order. ``before`` is called ahead of each, on the calling
    thread, and may block. ``writable_bytes`` counts down with every write and reservation; what
    does not fit fails with ``ENOSPC`` until something is unlinked.
    """

    def __init__(
        self,
        inner: Device,
        faults: Sequence[Fault] = (),
        *,
        seed: int = 0,
        failure_rate: float = 0.0,
        writable_bytes: int | None = None,
        before: Callable[[Operation], None] | None = None,
    ) -> None:
        self.inner = inner
        self.faults = list(faults)
        self.failure_rate = failure_rate
        self.writable_bytes = writable_bytes
        self.before = before
        self.calls: list[Operation] = []
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._reserved: dict[str, int] = {}

    def _enter(self, operation: Operation) -> Fault | None:
        """Count the operation, raise what is due, return the fault that shapes its result."""
        with self._lock:
            number, of_kind = len(self.calls), self.calls.count(operation)
            self.calls.append(operation)
            unlucky = self._random.random() < self.failure_rate
            due = [fault for fault in self.faults if fault.hits(operation, number, of_kind)]
        if self.before is not None:
            self.before(operation)
        for fault in due:
            if fault.error is not None:
                raise OSError(fault.error, os.strerror(fault.error))
        if unlucky:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return due[0] if due else None

    def list_names(self) -> list[str]:
        self._enter("list_names")
        return self.inner.list_names()

    def create(self, name: str, nbytes: int) -> int:
        self._enter("create")
        if self.writable_bytes is not None:
            if nbytes > self.writable_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.writable_bytes -= nbytes
            self._reserved[name] = nbytes
        return self.inner.create(name, nbytes)

    def open(self, name: str) -> int:
        self._enter("open")
        return self.inner.open(name)

    def is_intact(self, fd: int, nbytes: int) -> bool:
        self._enter("is_intact")
        return self.inner.is_intact(fd, nbytes)

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

    def sync(self, fd: int) -> None:
        self._enter("sync")
        self.inner.sync(fd)

    def sync_directory(self) -> None:
        self._enter("sync_directory")
        self.inner.sync_directory()

    def read_file(self, name: str) -> bytes:
        self._enter("read_file")
        return self.inner.read_file(name)

    def replace_file(self, name: str, data: bytes) -> None:
        self._enter("replace_file")
        if self.writable_bytes is not None:
            if len(data) > self.writable_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.writable_bytes += self._reserved.get(name, 0) - len(data)
            self._reserved[name] = len(data)
        self.inner.replace_file(name, data)

    def file_bytes(self, name: str) -> int:
        return self.inner.file_bytes(name)

    def unlink(self, name: str, fd: int | None = None) -> None:
        self._enter("unlink")
        self.inner.unlink(name, fd)
        if self.writable_bytes is not None:
            self.writable_bytes += self._reserved.pop(name, 0)

    def close(self, fd: int) -> None:
        self.inner.close(fd)

    def free_bytes(self) -> int:
        self._enter("free_bytes")
        return self.inner.free_bytes()


def _leading(segments: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    nbytes -= nbytes % BLOCK_BYTES
    leading = []
    for segment in segments:
        piece = segment[:nbytes]
        nbytes -= piece.nbytes
        leading.append(piece)
    return leading


def _flip(segments: Sequence[memoryview], bit: int) -> None:
    """Flip one bit, counted over all segments and modulo their size."""
    position = bit // 8 % sum(segment.nbytes for segment in segments)
    for segment in segments:
        if position < segment.nbytes:
            segment[position] ^= 1 << bit % 8
            return
        position -= segment.nbytes


class FaultyEngine(TierEngine):
    """Any engine, with chosen jobs failing at once or held back.

    Jobs are numbered from 0 in order of submission. One in ``failing`` finishes with its reason on
    every page, unseen by the inner engine. After ``hold`` jobs wait, unsubmitted, until
    ``release``; so an engine that finishes inside submit can stand for a slow one.
    """

    def __init__(self, inner: TierEngine, failing: dict[int, Reason] | None = None) -> None:
        self.inner = inner
        self.failing = failing or {}
        self.num_jobs = 0
        self._lock = threading.Lock()
        self._holding = False
        self._held: list[Job] = []

    def hold(self) -> None:
        with self._lock:
            self._holding = True

    def release(self, timeout_s: float = 10.0) -> None:
        """Run what was held, in order, and finish it. Blocks until the inner engine is done."""
        with self._lock:
            self._holding = False
            held, self._held = self._held, []
        for job in held:
            if not job.cancelled:
                inner_job = self._submit_inner(job.kind, job.run)
                assert inner_job.wait(timeout_s), "the inner engine did not finish a held job"
                job.reasons = inner_job.reasons
            job.finish()

    def submit_store(self, run: Run) -> Job:
        return self._submit(JobKind.STORE, run)

    def submit_load(self, run: Run, *, deadline_s: float | None = None) -> Job:
        return self._submit(JobKind.LOAD, run)

    def _submit(self, kind: JobKind, run: Run) -> Job:
        with self._lock:
            reason = self.failing.get(self.num_jobs)
            self.num_jobs += 1
            if reason is None and not self._holding:
                return self._submit_inner(kind, run)
            job = Job(kind, run)
            if reason is None:
                self._held.append(job)
            else:
                job.reasons = [reason] * run.num_pages
                job.finish()
            return job

    def _submit_inner(self, kind: JobKind, run: Run) -> Job:
        store = kind is JobKind.STORE
        return self.inner.submit_store(run) if store else self.inner.submit_load(run)

    def lookup(self, keys: Sequence[bytes]) -> LookupResult:
        return self.inner.lookup(keys)

    def some_keys(self, limit: int) -> list[bytes]:
        return self.inner.some_keys(limit)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self.inner.contains(keys)

    def stats(self) -> TierStats:
        stats = self.inner.stats()
        return dataclasses.replace(
            stats, num_inflight_jobs=stats.num_inflight_jobs + len(self._held)
        )

    def tenants(self, limit: int) -> list[TenantUsage]:
        return self.inner.tenants(limit)

    def erase(self, what: Erasure, *, local: Future[bool] | None = None) -> Future[bool]:
        """What is held counts as queued: a store of any of the pages is dropped whole."""
        with self._lock:
            for job in self._held:
                if what.keys is None:
                    is_meant = what.tenant in (None, job.run.tenant)
                else:
                    is_meant = not set(what.keys).isdisjoint(job.run.keys)
                if is_meant and job.kind is JobKind.STORE:
                    job.cancel()
        return self.inner.erase(what)

    def set_namespace(self, namespace: bytes, *, keep: bool = True) -> None:
        self.inner.set_namespace(namespace, keep=keep)

    def flush(self, timeout_s: float) -> bool:
        return self.inner.flush(timeout_s)

    def close(self) -> None:
        with self._lock:
            held, self._held = self._held, []
        for job in held:
            job.finish()
        self.inner.close()

    def check_integrity(self) -> None:
        self.inner.check_integrity()
