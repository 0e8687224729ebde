"""The side of a handoff that sends KV."""

from __future__ import annotations
