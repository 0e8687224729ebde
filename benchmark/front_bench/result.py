"""What the benchmarks of fronts write."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any

from sglang_tiered.tools.machine import describe_machine, describe_versions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, and what it lies between."""
    middle = statistics.median(values)
    return {"value": middle, "min": min(values), "max": max(values), "n": len(values)}


def write_result(
    path: Path | None, settings: dict[str, Any], ratios: dict[str, Any], raw: Any
) -> None:
    """Write a result file, if one is asked for."""
    if path is not None:
        about = {"machine": describe_machine(), "versions": describe_versions()}
        document = {**about, "settings": settings, "ratios": ratios, "raw": raw}
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
