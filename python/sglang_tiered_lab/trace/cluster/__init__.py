"""Replay of a trace on a whole cluster, without a model: which routing pays, and how many servers.

Its page is the section on clusters of the README of ``trace``.
"""

from __future__ import annotations

__all__ = ["ADMISSIONS", "POLICIES"]

POLICIES = (
    "in-turn",
    "hash",
    "least-load",
    "least-tokens",
    "p2c",
    "cache-aware",
    "dynamo",
    "llm-d",
    "cost",
    "oracle",
)
ADMISSIONS = ("none", "queue", "predicted", "soft")
