"""Replay of a trace on modelled tiers, without a model: which policy and which sizes pay off."""

from __future__ import annotations

__all__ = ["POLICIES", "ROUTES"]

POLICIES = ("lru", "hicache", "tiered", "belady", "infinite")
ROUTES = ("prefix", "session", "round-robin")
