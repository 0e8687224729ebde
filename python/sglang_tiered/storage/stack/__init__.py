"""NVMe and what lies beyond it, as one tier. See ``README.md`` of this package."""

from __future__ import annotations

from sglang_tiered.storage.stack.tier_stack import TierStack

__all__ = ["TierStack"]
