"""What this package exports beside SGLang's own on ``/metrics``: the table, and durations.

A new metric is a counter, a field of a stats object, and a row of the table.
``scripts/write_tables.py`` writes the tables of the documents. Imports nothing heavy and no other
room, so that every room may count with it.
"""

from __future__ import annotations

from sglang_tiered.metrics.durations import BOUNDS_S, DurationCounts, Durations
from sglang_tiered.metrics.table import (
    MEMORY_METRICS,
    METRICS,
    PREFIX,
    TRANSFER_METRICS,
    Kind,
    Metric,
    Source,
)

__all__ = [
    "BOUNDS_S",
    "MEMORY_METRICS",
    "METRICS",
    "PREFIX",
    "TRANSFER_METRICS",
    "DurationCounts",
    "Durations",
    "Kind",
    "Metric",
    "Source",
]
