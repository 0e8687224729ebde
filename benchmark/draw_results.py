"""Draws the pictures of the documents from the raw results that lie in ``results``.

    python benchmark/draw_results.py [--results DIR] [--pictures DIR]

Every picture names its machine and date. The same results give the same bytes, so that a test can
tell a picture that is older than its results. Of the demo's results (``scripts/demo --json FILE``)
the last by name is drawn; pictures without results are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from dashboard_run.figure import dashboard_figure
from serving_bench.users_figure import users_figure
from storage_bench.figures import percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

RESULTS = Path(__file__).parent / "results"
DRAWN = Path(__file__).parents[1] / "docs" / "pictures"

COMPUTED, DEVICE, HOST, NVME, RESTARTED = "#8c959f", "#0969da", "#1a7f37", "#bf8700", "#bc4c00"
# As scripts/demo names where a row's prompts came from.
DEMO_COLOURS = {
    "first time": COMPUTED,
    "device": DEVICE,
    "host": HOST,
    "NVMe": NVME,
    "NVMe after kill -9": RESTARTED,
}
# As the scenario same_turn names places, with what is shown.
PLACES = {
    "device": ("device memory", DEVICE),
    "host": ("host memory", HOST),
    "nvme": ("NVMe", NVME),
    "peer": ("another server", RESTARTED),
    "bucket": ("bucket", "#8250df"),
    "computed": ("computed", COMPUTED),
}
DEMO_TOKENS = ("device", "host", "nvme", "computed")
# Text stays text: files are small, and every figure in them can be read and searched.
STYLE = {"svg.hashsalt": "sglang-tiered", "svg.fonttype": "none", "font.size": 10}


class NothingToDrawError(Exception):
    """Results that must not be shown; one sentence."""


@dataclass(frozen=True)
class Row:
    """One bar: a median with its extremes, and what stands behind it."""

    label: str
    median_s: float
    min_s: float
    max_s: float
    colour: str
    columns: tuple[str, ...] = ()

    @classmethod
    def of(cls, label: str, seconds: Iterable[float], colour: str) -> Row:
        values = list(seconds)
        return cls(label, statistics.median(values), min(values), max(values), colour)

    @property
    def figures(self) -> str:
        return f"{_ms(self.median_s)} ms ({_ms(self.min_s)} to {_ms(self.max_s)})"


@dataclass(frozen=True)
class Picture:
    """What is drawn, apart from how."""

    title: str
    rows: list[Row]
    notes: list[str]
    headers: tuple[str, ...] = ()


def by_tier(document: dict[str, Any]) -> Picture:
    """``bench_serving``, scenario ``disk_added``: the same conversations out of each tier."""
    raw = document["raw"]["disk_added"]

    def seconds(rounds: list[dict[str, Any]], asked: str) -> list[float]:
        turns = [turn for one in rounds for turn in one.get("tiered", [])]
        return [turn["ttft_s"] for turn in turns if _way(turn["label"]) == asked]

    rows = [
        Row.of("first time, computed", seconds(raw["beside"]["first"], "first"), COMPUTED),
        Row.of("back from host memory", seconds(raw["beside"]["one from host"], "one"), HOST),
        Row.of("back from NVMe", seconds(raw["samples"], "one"), NVME),
        Row.of("from NVMe after kill -9", seconds(raw["samples"], "restart"), RESTARTED),
    ]
    notes = [
        "Time to first token of 15 conversations of 1,024 to 2,048 tokens, one at a time; median "
        "(least to most).",
        "Returns have 100 new tokens, which are computed; nothing else is in device memory or the "
        "page cache.",
        _machine(document),
    ]
    return Picture("Where a conversation comes back from", rows, notes)


def returning(document: dict[str, Any]) -> Picture:
    """``bench_rounds``: each round beside stock SGLang. Returns are the medians of their rounds."""
    rounds = document["raw"]
    returns = [one for one in rounds if one["round"].startswith("return")]

    def rows(title: str, chosen: list[dict[str, Any]]) -> list[Row]:
        systems = (("stock SGLang", "stock", COMPUTED), ("with tiers", "tiered", NVME))
        return [
            Row.of(
                f"{title}, {label}",
                [statistics.median(one[name]["seconds"]) for one in chosen]
                if len(chosen) > 1
                else chosen[0][name]["seconds"],
                colour,
            )
            for label, name, colour in systems
        ]

    settings = document["settings"]
    notes = [
        f"Time to first token of {settings['num_prompts']} prompts of "
        f"{settings['prompt_length']:,} tokens; device memory holds "
        f"{settings['device_tokens']:,} tokens.",
        f"Median (least to most): of the prompts, for returns of the medians of {len(returns)} "
        "rounds.",
        _machine(document),
    ]
    bars = [*rows("first time", rounds[:1]), *rows("return", returns)]
    return Picture("Prompts that return", [*bars, *rows("after kill -9", rounds[-1:])], notes)


def demo(document: dict[str, Any]) -> Picture:
    """``scripts/demo --json``: its table."""
    if not document["answers_equal"]:
        raise NothingToDrawError("the demo's answers differ, so its times say nothing")
    rows = [
        Row(
            row["from"],
            *(row["ttft_s"][name] for name in ("median", "min", "max")),
            DEMO_COLOURS[row["from"]],
            tuple(f"{row['tokens'][name]:,}" for name in DEMO_TOKENS),
        )
        for row in document["rows"]
    ]
    counts = ", ".join(f"{row['num_prompts']} ({row['from']})" for row in document["rows"])
    notes = [
        "Time to first token, median (least to most), and prompt tokens by where they came from.",
        f"Prompts: {counts}. All answers were equal.",
        _machine(document),
    ]
    headers = ("device", "host", "NVMe", "computed")
    return Picture("scripts/demo: the same prompts, again and again", rows, notes, headers)


def by_place(document: dict[str, Any]) -> Picture:
    """``bench_serving``, scenario ``same_turn``: the same turns out of every place."""
    raw = document["raw"]["same_turn"]
    if raw["unequal"]:
        raise NothingToDrawError("answers of same_turn differ, so its times say nothing")
    rounds = raw["samples"]
    rows = []
    for place, (label, colour) in PLACES.items():
        seconds = [sample["ttft_s"] for one in rounds for sample in one.get(place, [])]
        if seconds:
            row = Row.of(label, seconds, colour)
            p99 = (_ms(percentile(seconds, 0.99)),)
            rows.append(replace(row, columns=p99))
    notes = [
        f"Time to first token of {len(rounds)} turns, each asked out of every place; median (least "
        "to most), and p99, in ms.",
        raw["conditions"].partition(", each out of")[0] + ". All answers were equal.",
        _machine(document),
    ]
    return Picture("The same turn, out of every place", rows, notes, ("p99",))


def by_users(document: dict[str, Any]) -> Figure:
    """``bench_serving``, scenario ``users``: four systems as users come."""
    figure = users_figure(document["raw"]["users"]["points"])
    figure.suptitle("Users of growing conversations", weight="bold", x=0.02, ha="left")
    figure.supxlabel(_machine(document), size=9, color="#57606a", x=0.02, ha="left")
    return figure


def recorded_dashboard(document: dict[str, Any]) -> Figure:
    """``record_dashboard.py``: what the dashboard's panels showed."""
    figure = dashboard_figure(document)
    slow = document["settings"]["slow_disk"]
    note = (
        f"seconds; while the ground is coloured the disk gives {slow['bytes_per_s'] / 1e6:g} MB/s. "
        f"Prometheus {document['versions']['prometheus']}. "
    )
    note += _machine(document)
    figure.supxlabel(note, size=9, color="#57606a", x=0.02, ha="left")
    return figure


# Name of the picture, pattern of its results, what is shown of them.
PICTURES: tuple[tuple[str, str, Callable[[dict[str, Any]], Picture | Figure]], ...] = (
    ("dashboard.svg", "dashboard_*.json", recorded_dashboard),
    ("users.svg", "serving_users_*.json", by_users),
    ("same_turn.svg", "serving_same_turn_*.json", by_place),
    ("ttft_by_tier.svg", "serving_2core_xeon_202611.json", by_tier),
    ("returning_prompts.svg", "rounds_2core_epyc_202611.json", returning),
    ("demo.svg", "demo_*.json", demo),
)


def bars(picture: Picture) -> Figure:
    """Bars from the top down with their figures behind them; on white, for dark pages too."""
    height = 0.34 * len(picture.rows) + 0.24 * len(picture.notes) + 0.85
    figure = Figure(figsize=(8.8, height), facecolor="white")
    below = 0.24 * len(picture.notes) + 0.15
    width = 0.38 if picture.headers else 0.7
    axes = figure.add_axes((0.22, below / height, width, 0.34 * len(picture.rows) / height))
    axes.set_axis_off()
    longest = max(row.max_s for row in picture.rows)
    axes.set_xlim(0, longest * (2.25 if picture.headers else 1.35))
    axes.set_ylim(len(picture.rows) - 0.5, -0.5)
    for place, row in enumerate(picture.rows):
        axes.barh(place, row.median_s, height=0.62, color=row.colour)
        axes.hlines(place, row.min_s, row.max_s, color="#1f2328", linewidth=1)
        axes.annotate(
            row.label, (0, place), (-6, 0), textcoords="offset points", ha="right", va="center"
        )
        axes.annotate(
            row.figures, (row.max_s, place), (6, 0), textcoords="offset points", va="center"
        )
        for number, text in enumerate(row.columns):
            _cell(axes, number, place, text)
    for number, text in enumerate(picture.headers):
        _cell(axes, number, -0.9, text, weight="bold")
    figure.text(0.02, 1 - 0.3 / height, picture.title, weight="bold", size=12)
    for number, note in enumerate(reversed(picture.notes)):
        figure.text(0.02, (0.1 + 0.24 * number) / height, note, size=9, color="#57606a")
    return figure


def _cell(axes: Any, number: int, place: float, text: str, **style: Any) -> None:
    """Right-aligned in the table beside the bars: across in axes, down in rows."""
    where = (1.14 + 0.26 * number, place)
    axes.text(*where, text, transform=axes.get_yaxis_transform(), ha="right", va="center", **style)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}"


def _machine(document: dict[str, Any]) -> str:
    machine = document["machine"]
    cores, memory = machine["cores"], machine["memory_gib"]
    return f"{cores} cores, {machine['cpu']}, {memory} GiB; {machine['date']}"


def _way(label: str) -> str:
    """How ``disk_added`` asked this turn: ``disk_added/CONVERSATION/TURN[/WAY/ROUND/FROM]``."""
    _, conversation, _, *rest = label.split("/")
    if conversation == "filler":
        return "filler"
    return rest[0] if rest else "first"


def draw_all(results: Path, pictures: Path) -> list[Path]:
    """Every picture that has results; their paths."""
    drawn = []
    for name, pattern, describe in PICTURES:
        found = sorted(results.glob(pattern))
        if found:
            with mpl.rc_context(STYLE):
                shown = describe(json.loads(found[-1].read_text(encoding="utf-8")))
                figure = bars(shown) if isinstance(shown, Picture) else shown
                FigureCanvasSVG(figure)
                metadata = {"Date": None, "Creator": None}
                figure.savefig(pictures / name, format="svg", metadata=metadata)
            drawn.append(pictures / name)
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--pictures", type=Path, default=DRAWN, help="default: %(default)s")
    options = parser.parse_args()
    try:
        for path in draw_all(options.results, options.pictures):
            print(path)
    except NothingToDrawError as error:
        print(f"draw_results: {error}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
