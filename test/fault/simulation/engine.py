"""Region engines on simulated devices: opened, and closed with nothing left behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from kit.tiers import open_region
from sglang_tiered.storage.region import RegionEngine, recovery, view, workers, writer
from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.region.format import BLOCK_BYTES

REGION = 64 * 1024


OPTIONS: dict[str, Any] = {
    "capacity_bytes": 64 * REGION,
    "region_bytes": REGION,
    "num_threads": 3,
    "sync_interval_s": 3600.0,
    # A test that lets its clock jump over a pause must not make a sick device of a slow thread.
    "io_timeout_s": 3600.0,
}
"""Few threads, small regions, room for everything, and no barrier but those of the test."""


@contextlib.contextmanager
def small_steps() -> Iterator[None]:
    """Extents of a few pages are written in several pieces, their header last; pinned pages
    move tenant by tenant; a start indexes few pages at once, and fingerprints are read in
    pieces."""
    with (
        mock.patch.object(workers, "_CHUNK_BYTES", 4 * BLOCK_BYTES),
        mock.patch.object(writer, "MAX_SAVED_BYTES", 1),
        mock.patch.object(view, "_ROWS_AT_ONCE", 3),
        mock.patch.object(recovery, "_PAGES_AT_ONCE", 3),
    ):
        yield


@contextlib.contextmanager
def running(directory: Path, device: FileDevice | None, **changes: Any) -> Iterator[RegionEngine]:
    """An engine that takes small steps, for as long as the block takes; every thread it started
    must be gone then."""
    before = set(threading.enumerate())
    with small_steps():
        engine = open_region(directory, device=device, **(OPTIONS | changes))
        try:
            yield engine
        finally:
            engine.close()
            leftover = sorted(thread.name for thread in set(threading.enumerate()) - before)
    assert not leftover, f"threads outlive their engine: {leftover}"
