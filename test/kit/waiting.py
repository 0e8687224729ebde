"""Waiting for what other threads do, with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from sglang_tiered.storage.base import Job, Reason, TierEngine

TIMEOUT_S = 20.0
"""For what takes milliseconds on an idle machine; this one computes other tests as well."""

_PAUSE_S = 0.005
_LOOK_S = 0.001


def eventually(
    condition: Callable[[], object], what: str = "", *, timeout_s: float = TIMEOUT_S
) -> None:
    """Ask again until the condition holds. Fails after ``timeout_s`` and names ``what``."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"did not come true within {timeout_s:.0f} s: {what}"
        pause.wait(_PAUSE_S)


def finished(job: Job) -> list[Reason]:
    assert job.wait(TIMEOUT_S), "the job did not finish"
    return job.reasons


def drained(tier: TierEngine, timeout_s: float) -> bool:
    """Wait until no job of a tier is under way; false when the time ran out."""
    deadline = time.monotonic() + timeout_s
    while True:
        stats: Any = tier.stats()
        if not stats.num_inflight_jobs:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_S)
