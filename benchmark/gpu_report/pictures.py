"""The report as a picture for each part: a bar a figure, with its spread, one panel a unit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


BAR_INCHES, PANEL_INCHES, WIDTH_INCHES = 0.28, 0.9, 9.0
TIMES_WIDE = 50.0
"""A panel whose largest figure is so many times its least one gets a logarithmic scale."""


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``PART.svg`` for every part of a ``report.json`` that has figures, and return the
    files. Raises ``ImportError`` without matplotlib."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    written = []
    for name, part in report["parts"].items():
        panels: dict[str, list[dict[str, Any]]] = {}
        for figure in part["figures"]:
            if "skipped" not in figure:
                panels.setdefault(figure["unit"], []).append(figure)
        if not panels:
            continue
        inches = [PANEL_INCHES + BAR_INCHES * len(bars) for bars in panels.values()]
        sheet = Figure((WIDTH_INCHES, sum(inches) + PANEL_INCHES), layout="constrained")
        sheet.suptitle(f"{name}: {report['device']}, {report['date']}", fontsize=10)
        axes = sheet.subplots(len(panels), 1, squeeze=False, height_ratios=inches)[:, 0]
        for axis, (unit, bars) in zip(axes, panels.items(), strict=True):
            _draw_panel(axis, unit, bars)
        path = folder / f"{name}.svg"
        FigureCanvasSVG(sheet).print_svg(str(path))
        written.append(path)
    return written


def _draw_panel(axis: Any, unit: str, bars: list[dict[str, Any]]) -> None:
    values = [float(bar["value"]) for bar in bars]
    below = [
        max(value - bar.get("min", value), 0.0) for value, bar in zip(values, bars, strict=True)
    ]
    above = [
        max(bar.get("max", value) - value, 0.0) for value, bar in zip(values, bars, strict=True)
    ]
    places = range(len(bars))
    axis.barh(places, values, xerr=(below, above), color="#0969da", ecolor="#24292f", capsize=2)
    axis.set_yticks(places, [bar["name"] for bar in bars], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel(unit, fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    if min(values) > 0 and max(values) / min(values) > TIMES_WIDE:
        axis.set_xscale("log")
    if unit == "ratio":
        axis.axvline(1.0, color="#8c959f", linewidth=0.8)
