"""The NVMe tier: an append-only log of fixed-size region files. Format: ``README.md``."""

from __future__ import annotations

from sglang_tiered.storage.region.engine import RegionEngine

__all__ = ["RegionEngine"]
