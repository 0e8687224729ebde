"""Recorded workloads: readers, and replays on the tiers without a model."""

from __future__ import annotations
