"""The dashboard asks for metrics that exist, for all of them, in expressions that Prometheus
parses, and explains every panel."""

from __future__ import annotations

import itertools
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from kit.promtool import promtool
from sglang_tiered.metrics import METRICS, PREFIX, TRANSFER_METRICS, MetricKind

SCRIPTS = Path(__file__).parents[2] / "scripts"
SUFFIXES = {
    MetricKind.COUNTER: ("_total",),
    MetricKind.GAUGE: ("",),
    MetricKind.HISTOGRAM: ("_bucket", "_count", "_sum"),
}
EXPORTED = {
    metric.full_name + suffix: metric
    for metric in (*METRICS, *TRANSFER_METRICS)
    for suffix in SUFFIXES[metric.kind]
}


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((SCRIPTS / "grafana" / "sglang-tiered.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_every_metric_is_shown_by_its_exported_name() -> None:
    asked_for = {name for text in expressions() for name in re.findall(rf"{PREFIX}\w+", text)}
    assert asked_for <= EXPORTED.keys()
    shown = {EXPORTED[name] for name in asked_for}
    assert [metric.name for metric in EXPORTED.values() if metric not in shown] == []


def test_what_panels_select_by_exists() -> None:
    """A panel of a label or a value that no series has is empty, and looks as if all were well."""
    common = {"instance", "model_name", "tp_rank", "dp_rank", "pp_rank", "le"}
    for text in expressions():
        for name, selectors in re.findall(rf"({PREFIX}\w+)\{{(.*?)\}}", text):
            metric = EXPORTED[name]
            known = [(*one.labels, *keys) for one in metric.sources for keys in one.known or [()]]
            by = ", ".join(re.findall(r"by \(([\w, ]+)\)", text))
            chosen = re.findall(r'(\w+)=~?"(.*?)"', selectors)
            labels = {label for label, _ in chosen} | set(filter(None, by.split(", ")))
            assert labels <= common | set(metric.labels), text
            for label, value in chosen:
                if label in metric.labels and not value.startswith("$"):
                    at = metric.labels.index(label)
                    values = {keys[at] for keys in known if at < len(keys)}
                    assert set(value.split("|")) <= values, text
    # Prometheus 2 sees ``sglang_`` where SGLang says ``sglang:``.
    collector = find_spec("sglang.srt.observability.metrics_collector")
    source = Path(str(collector and collector.origin)).read_text(encoding="utf-8")
    every = " ".join(expressions())
    assert "sglang[:_]" in every and "sglang:" not in every
    named = {name.removesuffix("_bucket") for name in re.findall(r"sglang\[:_\](\w+)", every)}
    assert not [name for name in named if f'"sglang:{name}"' not in source]


@pytest.mark.parametrize(
    ("name", "shared", "wanted"),
    [
        ("tier_held_tokens", "object", {"nvme": 2, "object": 1}),
        ("tier_physical_bytes", "object", {"nvme": 4, "object": 2}),
        ("tier_pages", "peer", {"nvme": 4, "peer": 2}),
    ],
)
def test_what_servers_share_is_counted_once(
    name: str, shared: str, wanted: dict[str, int], tmp_path: Path
) -> None:
    """Two servers of two ranks, each of which tells 1 of each tier."""
    (asked,) = [text for text in expressions() if f"{PREFIX}{name}{{" in text]
    series = [
        f'{PREFIX}{name}{{instance="{server}",model_name="m",tp_rank="{rank}",tier="{tier}"}}'
        for server, rank, tier in itertools.product("ab", "01", ("nvme", shared))
    ]
    samples = [{"labels": f'{{tier="{tier}"}}', "value": value} for tier, value in wanted.items()]
    asked = re.sub(r"\$\w+", ".*", asked)
    test = {
        "interval": "1m",
        "input_series": [{"series": one, "values": "1x10"} for one in series],
        "promql_expr_test": [{"expr": asked, "eval_time": "5m", "exp_samples": samples}],
    }
    path = tmp_path / "cases.yaml"
    path.write_text(json.dumps({"evaluation_interval": "1m", "tests": [test]}))
    promtool("test", "rules", path)


def test_prometheus_parses_every_expression(tmp_path: Path) -> None:
    filled = [
        re.sub(r"\$\w+", ".*", text.replace("$__rate_interval", "1m")) for text in expressions()
    ]
    rules = [{"record": f"panel:{at}", "expr": text} for at, text in enumerate(filled)]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", path)
