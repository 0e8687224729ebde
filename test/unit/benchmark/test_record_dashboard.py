"""What is recorded of a panel: its own expression, its legend, and a value for every step."""

from __future__ import annotations

import json

from record_dashboard import DASHBOARD, RATE_S, STEP_S, filled, legend, values


def test_no_variable_of_grafana_reaches_prometheus() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    asked = [filled(target["expr"]) for panel in panels for target in panel.get("targets", ())]
    assert asked
    assert not [expression for expression in asked if "$" in expression]
    assert any(f"[{RATE_S}s]" in expression for expression in asked)


def test_a_legend_takes_the_labels_of_its_series() -> None:
    labels = {"tier": "nvme", "unit": "byte"}
    assert legend("{{tier}} {{unit}}", labels) == "nvme byte"
    assert legend("{{tier}} {{gone}}/s", labels) == "nvme /s"


def test_gaps_and_no_numbers_are_null() -> None:
    begun = 1000.0
    samples = [(begun, "0"), (begun + STEP_S, "NaN"), (begun + 3 * STEP_S, "12345.678")]
    assert values(samples, begun, begun + 4 * STEP_S) == [0.0, None, None, 12350.0, None]
