"""Host tiers that device memory outgrows."""

from __future__ import annotations
