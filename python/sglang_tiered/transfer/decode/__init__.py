"""The side of a handoff that receives KV."""

from __future__ import annotations
