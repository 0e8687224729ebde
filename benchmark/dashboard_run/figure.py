"""The dashboard as ``record_dashboard.py`` recorded it, in matplotlib. Needs matplotlib."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


WIDTH, PANEL_HEIGHT, TITLE_HEIGHT, COLUMNS = 14.0, 1.7, 0.32, 4
UNITS = {"s": "s", "Bps": "B/s", "bytes": "B"}
HEADROOM = 1.35  # for the legend
SLOW = "#fff1d6"


def dashboard_figure(document: Mapping[str, Any]) -> Figure:
    """Draw the panels under the titles of their rows. What was empty or 0 throughout is left out:
    lines, panels and rows."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for panel in document["raw"]["panels"]:
        lines = [line for line in panel["lines"] if any(line["values"])]
        if lines:
            rows.setdefault(panel["row"], []).append({**panel, "lines": lines})
    counts = [math.ceil(len(panels) / COLUMNS) for panels in rows.values()]
    heights = [count * PANEL_HEIGHT + TITLE_HEIGHT for count in counts]
    figure = Figure(figsize=(WIDTH, sum(heights)), facecolor="white", layout="constrained")
    parts = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)
    for (row, panels), count, (part,) in zip(rows.items(), counts, parts, strict=True):
        part.suptitle(row, x=0.01, ha="left", weight="bold", size=11)
        places = part.subplots(count, COLUMNS, squeeze=False).flat
        for axes, panel in itertools.zip_longest(places, panels):
            if panel is None:
                axes.set_axis_off()
            else:
                _draw(axes, panel, document["settings"])
    return figure


def _draw(axes: Any, panel: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    lines = panel["lines"]
    at = [settings["step_s"] * step for step in range(len(lines[0]["values"]))]
    slow = settings["slow_disk"]
    axes.axvspan(slow["from_s"], slow["to_s"], color=SLOW, linewidth=0)
    axes.set_title(panel["title"], fontsize=8, loc="left")
    axes.set_xlim(at[0], at[-1])
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.spines[["top", "right"]].set_visible(False)
    _say_unit(axes, panel["unit"])
    if panel["is_stacked"]:
        axes.stackplot(
            at,
            [[value or 0.0 for value in line["values"]] for line in lines],
            labels=[line["legend"] for line in lines],
            alpha=0.6,
        )
    else:
        right = axes.twinx() if any("unit" in line for line in lines) else None
        for number, line in enumerate(lines):
            where = right if right is not None and "unit" in line else axes
            where.plot(at, _numbers(line["values"]), color=f"C{number}", linewidth=1.2)
            axes.plot([], [], color=f"C{number}", label=line["legend"])
            if where is right and right is not None:
                right.spines[["top"]].set_visible(False)
                _say_unit(right, line["unit"])
                right.set_ylim(0, right.get_ylim()[1] * HEADROOM)
    axes.set_ylim(0, axes.get_ylim()[1] * HEADROOM)
    axes.legend(loc="upper left", frameon=False, ncols=2 if len(lines) > 2 else 1, fontsize=6)


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _say_unit(axes: Any, unit: str) -> None:
    axes.tick_params(labelsize=7)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    if unit == "percentunit":
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    else:
        axes.yaxis.set_major_formatter(EngFormatter(UNITS.get(unit, "")))
