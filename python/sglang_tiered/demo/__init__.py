"""``sglang-tiered demo``: what the tiers do, seen in some two minutes, with a small model."""

from __future__ import annotations
