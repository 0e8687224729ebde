"""What the tiers report: counters, metrics, KV events."""

from __future__ import annotations
