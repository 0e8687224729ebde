"""Pictures of a replay: hit rate against the size of the NVMe tier, and how TTFT is distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tiered import flags
from sglang_tiered.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sglang_tiered_lab.trace.replay.runner import Replay, Run


_SUFFIXES = (".png", ".pdf", ".svg")


def require(path: Path) -> None:
    """Raise ``ConfigError`` unless a picture can be drawn into that file."""
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"--plot {path} must end in {', '.join(_SUFFIXES)}.")
    flags.require("--plot", "matplotlib")


def draw(path: Path, plan: Replay, runs: Sequence[Run]) -> None:
    require(path)
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    largest = max(run.sizes.nvme_tokens for run in runs)
    for policy in plan.policies:
        mine = sorted(
            (run for run in runs if run.policy == policy), key=lambda run: run.sizes.nvme_tokens
        )
        left.plot(
            [run.sizes.nvme_tokens / 1e6 for run in mine],
            [100 * run.totals.hit_rate for run in mine],
            marker="o",
            label=policy,
        )
        shown = next(run for run in mine if run.sizes.nvme_tokens == largest)
        curve = shown.totals.ttft_returning.curve() or shown.totals.ttft.curve()
        right.plot([x for x, _ in curve], [100 * y for _, y in curve], label=policy)
    left.set_xlabel("NVMe tier of each server, million tokens")
    left.set_ylabel("hit rate, % of units")
    left.set_ylim(bottom=0)
    right.set_xlabel(f"modelled TTFT of returning turns, s (NVMe {_label(runs, largest)})")
    right.set_ylabel("% of requests")
    right.set_xscale("log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{plan.stream.name}, {plan.num_servers} server(s)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _label(runs: Sequence[Run], nvme_tokens: int) -> str:
    return next(run.sizes.label for run in runs if run.sizes.nvme_tokens == nvme_tokens)
