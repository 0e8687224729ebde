"""Reads of a scheduling world that are late, and bring less than they were asked for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random

    import torch

__all__ = ["SlowReads"]


class _SlowJob:
    """A read that seems to take longer, and to bring less."""

    def __init__(self, job: Any, reads: SlowReads) -> None:
        self._job, self._reads = job, reads
        self.ok: list[bool] = []

    def wait(self) -> None:
        self._reads.wait()
        self._job.wait()
        self.ok = self._reads.cut(self._job.ok)


class SlowReads:
    """Lets reads through one by one, and cuts some short: below ``ReadAhead``, which tells SGLang
    of parts that have arrived."""

    def __init__(self, reads: Any, rnd: random.Random) -> None:
        self._gate, self._rnd, self.is_open = threading.Semaphore(0), rnd, True
        self._begin_read = reads._begin_read
        reads._begin_read = self._begin

    def _begin(self, hashes: Any, host_indices: torch.Tensor) -> Any:
        return _SlowJob(self._begin_read(hashes, host_indices), self)

    def wait(self) -> None:
        while not self.is_open and not self._gate.acquire(timeout=0.01):
            pass

    def cut(self, served: list[bool]) -> list[bool]:
        if self.is_open or self._rnd.random() >= 0.08:
            return served
        cut = self._rnd.randrange(len(served) + 1)
        return served[:cut] + [False] * (len(served) - cut)

    def let(self, number: int) -> None:
        for _ in range(number):
            self._gate.release()
