"""Draws the hit-rate curve of a trace. The only module that needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import require
from sglang_tiered_lab.trace.writing import new_file

if TYPE_CHECKING:
    from pathlib import Path


def check_plot(path: Path) -> None:
    """Raises ``ConfigError`` where nothing could be drawn, before a long trace is read."""
    require("--plot", "matplotlib")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{path} is no .png, .svg or .pdf; name one.")


def draw(figures: dict[str, Any], path: Path) -> None:
    """Hit rate against capacity, with the rate without bound as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    tokens = [capacity for capacity, _ in figures["lru_curve"]]
    axes.plot(tokens, [100 * rate for _, rate in figures["lru_curve"]], label="LRU")
    axes.axhline(100 * figures["ideal_hit_rate"], linestyle="--", color="gray", label="no bound")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("cache size, tokens")
    axes.set_ylabel("hit rate, % of blocks")
    axes.set_title(f"{figures['trace']}: {figures['num_requests']:,} requests")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    with new_file(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=150)
