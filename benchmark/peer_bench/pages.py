"""The pages that are fetched, known to both processes by a seed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from sglang_tiered.storage.base import Run
from sglang_tiered.storage.region.device import aligned_buffer

NAMESPACE = bytes(range(32))


@dataclass
class Samples:
    """Seconds, and CPU seconds of both processes, per round."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def empty_run(page_bytes: int, num_bytes: int) -> Run:
    """Pages side by side, as in a host pool."""
    pool = aligned_buffer(num_bytes)
    num_pages = num_bytes // page_bytes
    keys = tuple(
        hashlib.sha256(f"{page_bytes}/{number}".encode()).digest() for number in range(num_pages)
    )
    return Run(keys, tuple((pool[i * page_bytes :][:page_bytes],) for i in range(num_pages)))


def filled_run(page_bytes: int, num_bytes: int) -> Run:
    """The same with the bytes that belong there."""
    run = empty_run(page_bytes, num_bytes)
    source = np.random.default_rng(page_bytes)
    for (page,) in run.pages:
        np.frombuffer(page, np.uint8)[:] = source.integers(0, 256, page.nbytes, dtype=np.uint8)
    return run


def fill_with(run: Run, value: int) -> None:
    """So that nothing of the round before can be taken for what arrived."""
    for (page,) in run.pages:
        np.frombuffer(page, np.uint8)[:] = value


def is_filled_right(run: Run, expected: Run) -> bool:
    pairs = zip(run.pages, expected.pages, strict=True)
    return all(
        np.array_equal(np.frombuffer(ours, np.uint8), np.frombuffer(theirs, np.uint8))
        for (ours,), (theirs,) in pairs
    )
