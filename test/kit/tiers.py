"""Every tier that keeps pages, by name, over which the contract of tiers runs; and small stores."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared_tier import SharedTier

from kit.memory import MemoryEngine
from kit.runs import NAMESPACE, blank, page_data, soft_encoding
from kit.waiting import TIMEOUT_S, drained, finished
from sglang_tiered.remote_config import ObjectConfig
from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.storage.base import Reason, Run, TierEngine
from sglang_tiered.storage.bucket import BucketEngine
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.region.disk import Disk
from sglang_tiered.storage.region.state import StoreState
from sglang_tiered.storage.stack import TierStack

KEEPING = [
    *("memory", "region-direct", "region-buffered"),
    *("object-memory", "object-directory", "stack"),
    *("region-zstd", "stack-zstd"),
]
BUCKET = os.environ.get("SGLANG_TIERED_TEST_BUCKET")
if BUCKET:  # any URL of an object tier; credentials are where they always are
    KEEPING.append("object-url")


def open_region(directory: Path, **changes: Any) -> RegionEngine:
    """Sixteen small regions, unless ``changes`` says otherwise."""
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "capacity_bytes": 1 << 22,
        "region_bytes": 1 << 18,
        "num_threads": 2,
    }
    return RegionEngine(directory, **(options | changes))


def open_disk(
    directory: Path, clock: Callable[[], float] = time.monotonic, namespace: bytes = NAMESPACE
) -> Disk:
    """The disk of a store without threads, whose device hangs after five seconds."""
    state = StoreState(namespace)
    log = OnceLog(logging.getLogger())
    return Disk(directory, FileDevice(directory), state, log, lambda: True, clock, 5.0)


def close_whole(engine: TierEngine) -> None:
    """Close what has come to rest with its books in order."""
    assert drained(engine, TIMEOUT_S)
    engine.check_integrity()
    engine.close()


def store(engine: TierEngine, *runs: Run) -> None:
    for run in runs:
        assert set(finished(engine.submit_store(run))) == {Reason.OK}


def load(engine: TierEngine, run: Run, **how: Any) -> list[Reason]:
    return finished(engine.submit_load(blank(run), **how))


def loads(engine: TierEngine, *runs: Run, **how: Any) -> None:
    """Load all pages, which are those that were stored."""
    for run in runs:
        target = blank(run)
        assert finished(engine.submit_load(target, **how)) == [Reason.OK] * run.num_pages
        assert page_data(target) == page_data(run)


def open_tier(
    name: str,
    directory: Path,
    *,
    capacity_bytes: int,
    region_bytes: int,
    queue_bytes: int = 64 << 20,
    max_tenant_bytes: int | None = None,
) -> TierEngine:
    """Open an empty tier. ``queue_bytes`` bounds its stores, where it has a queue."""
    if name == "memory":
        return MemoryEngine(capacity_bytes, max_tenant_bytes=max_tenant_bytes)
    if name.startswith("object"):
        urls = {
            "object-memory": f"memory://{directory}",
            "object-directory": (directory / "store").as_uri(),
            "object-url": f"{BUCKET}/{secrets.token_hex(8)}",
        }
        settings = ObjectConfig(
            url=urls[name],
            staging_bytes=queue_bytes,
            capacity_bytes=capacity_bytes,
            max_tenant_bytes=max_tenant_bytes,
            num_connections=2,
        )
        return BucketEngine(settings, namespace=NAMESPACE)
    folder = directory / "store"
    folder.mkdir(mode=0o700)
    region = open_region(
        folder,
        device=FileDevice(folder, direct=False if name == "region-buffered" else None),
        encoding=soft_encoding() if name.endswith("-zstd") else None,
        capacity_bytes=capacity_bytes,
        region_bytes=region_bytes,
        max_queued_store_bytes=queue_bytes,
        max_tenant_bytes=max_tenant_bytes,
    )
    if not name.startswith("stack"):
        return region
    bucket = SharedTier()
    bucket.known = False  # nothing is copied down, so that all outcomes are those of one run
    return TierStack(region, [bucket])
