"""PNG plots of a run: TTFT distributions, hit rate over time, tier occupancy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serving_bench.measures import hit_rate, reusable_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from serving_bench.client import Sample
    from serving_bench.measures import Outcome


WINDOW = 8  # requests a point of the hit rate is about


def running_hit_rate(samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Seconds since the first request, and the hit rate of the last ``WINDOW`` requests that could
    have hit anything."""
    able = sorted(
        (sample for sample in samples if reusable_tokens(sample)),
        key=lambda sample: sample.ended_s,
    )
    if not able:
        return [], []
    start_s = min(sample.started_s for sample in able)
    rates = [hit_rate(able[max(0, end - WINDOW) : end]) for end in range(1, len(able) + 1)]
    return [sample.ended_s - start_s for sample in able], rates


def draw_plots(
    folder: Path,
    outcomes: Mapping[str, Outcome],
    occupancy: Mapping[str, Sequence[Mapping[str, float]]],
) -> list[Path]:
    """Written into ``folder``, which is made; their paths. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def save(figure: Any, name: str) -> None:
        figure.tight_layout()
        figure.savefig(folder / name, dpi=120)
        plt.close(figure)
        written.append(folder / name)

    for scenario, outcome in outcomes.items():
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
        for name in outcome.systems:
            samples = outcome.samples(name)
            times = sorted(sample.ttft_s * 1e3 for sample in samples)
            shares = [(index + 1) / len(times) for index in range(len(times))]
            left.step(times, shares, where="post", label=name)
            seconds, rates = running_hit_rate(samples)
            right.plot(seconds, rates, label=name)
        left.set(title=scenario, xlabel="TTFT, ms", ylabel="share of requests", xscale="log")
        right.set(title=f"hit rate, last {WINDOW} requests", xlabel="s", ylim=(-0.02, 1.02))
        left.legend()
        save(figure, f"{scenario}.png")
    for scenario in dict.fromkeys(key.partition("/")[0] for key in occupancy):
        taken = {
            key.partition("/")[2]: points
            for key, points in occupancy.items()
            if key.startswith(f"{scenario}/")
        }
        figure, axes = plt.subplots(1, 3, figsize=(14, 4))
        for axis, tier, unit in zip(
            axes, ("device", "host", "storage"), ("tokens", "tokens", "MB"), strict=True
        ):
            for name, points in taken.items():
                scale = 1e6 if unit == "MB" else 1.0
                axis.plot(
                    [point["at_s"] for point in points],
                    [point[tier] / scale for point in points],
                    label=name,
                )
            axis.set(title=f"{scenario}: {tier}", xlabel="s", ylabel=unit)
        axes[0].legend()
        save(figure, f"{scenario}_occupancy.png")
    return written


def draw_users(folder: Path, points: Mapping[str, Sequence[Mapping[str, float]]]) -> Path:
    """Throughput and TTFT by the number of users. Needs matplotlib."""
    from serving_bench.users_figure import users_figure

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "users_points.png"
    users_figure(points).savefig(path, dpi=120)
    return path
