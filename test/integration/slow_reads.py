"""Reads of a scheduling world that are late, and bring less than they were asked for."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from sglang_tiered.storage.base import Job, JobKind, Reason

if TYPE_CHECKING:
    import random


class SlowReads:
    """Lets reads of a storage end one by one, and cuts some short."""

    def __init__(self, storage: Any, rnd: random.Random) -> None:
        self._rnd = rnd
        self._begin_load = storage.begin_load
        storage.begin_load = self._begin
        self._lock = threading.Lock()
        self._held: deque[tuple[Job, Job]] = deque()  # the read, and what the caller has of it
        self._num_let, self._is_open = 0, True

    @property
    def is_open(self) -> bool:
        return self._is_open

    @is_open.setter
    def is_open(self, is_open: bool) -> None:
        with self._lock:
            self._is_open = is_open
        self._end_some()

    def let(self, number: int) -> None:
        with self._lock:
            self._num_let += number
        self._end_some()

    def _begin(self, *arguments: Any, **named: Any) -> Job:
        read = self._begin_load(*arguments, **named)
        slow = Job(JobKind.LOAD, read.run)
        with self._lock:
            self._held.append((read, slow))
        self._end_some()
        return slow

    def _end_some(self) -> None:
        while True:
            with self._lock:
                if not self._held or not (self._is_open or self._num_let):
                    return
                self._num_let = max(0, self._num_let - 1)
                read, slow = self._held.popleft()
            read.call_at_end(lambda _, read=read, slow=slow: self._end(read, slow))

    def _end(self, read: Job, slow: Job) -> None:
        slow.reasons = self._cut(list(read.reasons))
        slow.finish()

    def _cut(self, reasons: list[Reason]) -> list[Reason]:
        if self._is_open or self._rnd.random() >= 0.08:
            return reasons
        cut = self._rnd.randrange(len(reasons) + 1)
        return reasons[:cut] + [Reason.MISS] * (len(reasons) - cut)
