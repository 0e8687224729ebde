"""Figures of a benchmark: medians with their spread, the table, and the JSON they end in."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence


KIB, MIB = 1 << 10, 1 << 20


class DifferentBytesError(Exception):
    """What came back is not what was stored, so no figure of the run means anything."""


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and number of the samples, as every result file holds them."""
    return {
        "value": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def quotients(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Sample by sample, as they were taken in turn. Raises ``ValueError`` if one is missing."""
    return [n / d for n, d in zip(numerators, denominators, strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest sample that at least ``share`` of all samples do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def size_name(nbytes: int) -> str:
    """``32KiB``, ``1MiB``: as it stands in the names of figures."""
    unit, name = (MIB, "MiB") if nbytes >= MIB else (KIB, "KiB")
    return f"{nbytes // unit}{name}"


@dataclass
class Report:
    """What the sections found. ``ratios`` holds every figure, quotient or not, by its name."""

    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _rows: list[tuple[str, str, str, str]] = field(default_factory=list)

    def add(
        self,
        name: str,
        values: Sequence[float],
        *,
        wanted: str = "",
        beside: str = "",
        in_table: bool = True,
    ) -> None:
        """Keep a figure and its row; ``beside`` says what the two sides were in plain units."""
        figure = self.ratios[name] = summarize(values)
        if not in_table:
            return
        spread = f" ({_short(figure['min'])} to {_short(figure['max'])})" if len(values) > 1 else ""
        self._rows.append((name, f"{_short(figure['value'])}{spread}", wanted, beside))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def table(self) -> Table:
        table = Table("figure", "median (min to max)", "wanted", "beside it")
        for row in self._rows:
            table.add_row(*row)
        return table


def _short(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.{max(2 - math.floor(math.log10(abs(value))), 0)}f}"
