"""Every tier that keeps pages, by name: what the contract of tiers runs over."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from shared_tier import SharedTier

from kit.faulty import FaultyEngine
from kit.memory import MemoryEngine
from kit.runs import NAMESPACE, soft_encoding
from sglang_tiered.storage.bucket import BucketEngine, BucketSettings
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice
from sglang_tiered.storage.stack import TierStack

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_tiered.storage.base import TierEngine
    from sglang_tiered.storage.encoding import PageEncoding

__all__ = ["KEEPING", "open_region", "open_tier"]

KEEPING = [
    *("memory", "faulty-without-faults", "region-direct", "region-buffered"),
    *("object-memory", "object-directory", "stack"),
    *("region-zstd", "stack-zstd"),
]
BUCKET = os.environ.get("SGLANG_TIERED_TEST_BUCKET")
if BUCKET:  # any URL of an object tier; credentials are where they always are
    KEEPING.append("object-url")


def open_region(
    directory: Path,
    *,
    direct: bool | None = None,
    encoding: PageEncoding | None = None,
    **sizes: int | None,
) -> RegionEngine:
    directory.mkdir(mode=0o700)
    device = FileDevice(directory, direct=direct)
    return RegionEngine(
        directory,
        namespace=NAMESPACE,
        num_threads=2,
        device=device,
        encoding=encoding,
        **sizes,  # type: ignore[arg-type]
    )


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
    if name in ("memory", "faulty-without-faults"):
        memory = MemoryEngine(capacity_bytes, max_tenant_bytes=max_tenant_bytes)
        return memory if name == "memory" else FaultyEngine(memory)
    if name.startswith("object"):
        urls = {
            "object-memory": f"memory://{directory}",
            "object-directory": (directory / "store").as_uri(),
            "object-url": f"{BUCKET}/{secrets.token_hex(8)}",
        }
        settings = BucketSettings(
            url=urls[name],
            staging_bytes=queue_bytes,
            capacity_bytes=capacity_bytes,
            max_tenant_bytes=max_tenant_bytes,
            num_connections=2,
        )
        return BucketEngine(settings, namespace=NAMESPACE)
    region = open_region(
        directory / "store",
        direct=False if name == "region-buffered" else None,
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
