"""HTTP endpoints and control messages of the tiers."""

from __future__ import annotations
