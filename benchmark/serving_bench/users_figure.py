"""Throughput and TTFT by the number of users, one line per system. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def users_figure(points: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """Draw ``points``: of each system what ``users`` measured at each number of users."""
    figure = Figure(figsize=(11, 4.2), facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, taken in points.items():
        users = [point["users"] for point in taken]
        (line,) = left.plot(
            users, [point["throughput_tokens_per_s"] for point in taken], marker="o", label=name
        )
        for share, style in (("p50", "-"), ("p99", ":")):
            right.plot(
                users,
                [point[f"ttft_{share}_s"] for point in taken],
                style,
                marker="o",
                color=line.get_color(),
                label=f"{name}, {share}",
            )
    left.set(title="throughput", xlabel="users", ylabel="prompt and output tokens/s")
    left.set_ylim(bottom=0)
    right.set(title="time to first token", xlabel="users", ylabel="s", yscale="log")
    left.legend()
    right.legend(fontsize="small")
    return figure
