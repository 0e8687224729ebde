"""NVMe over an object store, as one tier engine. See ``README.md`` of this package."""

from __future__ import annotations

from sglang_tiered.storage.stack.engine import LayeredEngine

__all__ = ["LayeredEngine"]
