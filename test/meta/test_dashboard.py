"""The dashboard asks for metrics that exist, for all of them, and explains every panel."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sglang_tiered.metrics import METRICS, PREFIX, Kind

FOLDER = Path(__file__).parents[2] / "scripts" / "grafana"


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((FOLDER / "sglang-tiered.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def asked_for() -> set[str]:
    expressions = [target["expr"] for panel in panels() for target in panel["targets"]]
    return {name for text in expressions for name in re.findall(rf"{PREFIX}\w+", text)}


def test_the_dashboard_shows_every_exported_metric() -> None:
    exported = {
        metric.full_name + ("_total" if metric.kind is Kind.COUNTER else "") for metric in METRICS
    }
    assert asked_for() == exported


def test_labels_in_expressions_are_labels_of_the_metric() -> None:
    labels = {metric.full_name: set(metric.labels) for metric in METRICS}
    for panel in panels():
        for target in panel["targets"]:
            for by, name in re.findall(
                rf"by \(([\w, ]+)\) \(rate\(({PREFIX}\w+)_total", target["expr"]
            ):
                assert set(by.split(", ")) == labels[name], target["expr"]


def test_every_panel_is_explained_in_order() -> None:
    text = (FOLDER / "README.md").read_text()
    explained = [title for title in re.findall(r"^\| ([^|]+) \|", text, re.M) if title != "panel"]
    assert explained == [panel["title"] for panel in panels()]


def test_panels_do_not_overlap() -> None:
    cells = set()
    for panel in panels():
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        for x in range(grid["x"], grid["x"] + grid["w"]):
            for y in range(grid["y"], grid["y"] + grid["h"]):
                assert (x, y) not in cells, panel["title"]
                cells.add((x, y))
