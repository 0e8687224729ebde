"""Made-up traces with the statistics of published ones."""

from __future__ import annotations
