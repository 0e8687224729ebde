"""``sglang-tiered demo``: what the tiers do, seen in about a minute, with a small random model."""

from __future__ import annotations
