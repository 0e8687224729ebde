"""Tables in documents say what the code says; the front page stays one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sglang_tiered.metrics import METRICS, TRANSFER_METRICS, Metric

ROOT = Path(__file__).parents[2]
MAX_FRONT_PAGE_BYTES = 8500


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def our_flags(table: str) -> list[str]:
    """The keys of ``TIER_FLAGS`` or ``TRANSFER_FLAGS``, read as text: this needs no SGLang."""
    source = (ROOT / "python/sglang_tiered/integration/launch/flags.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == table:
            assert isinstance(node.value, ast.Dict)
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError(f"{table} is not assigned at the top of launch/flags.py")


def table_rows(name: str, first_column: str) -> list[list[str]]:
    """The body of the table of a page whose header begins with this."""
    lines = page(name).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_front_page_stays_short() -> None:
    assert len(page("README.md").encode()) < MAX_FRONT_PAGE_BYTES


@pytest.mark.parametrize(
    ("first_column", "table"),
    [
        ("flag", "TIER_FLAGS"),
        ("object flag", "OBJECT_FLAGS"),
        ("peer flag", "PEER_FLAGS"),
        ("transfer flag", "TRANSFER_FLAGS"),
    ],
)
def test_every_flag_is_documented_and_no_other(first_column: str, table: str) -> None:
    rows = table_rows("docs/flags.md", first_column)
    assert [row[0].strip("`") for row in rows] == our_flags(table)


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("docs/metrics.md", METRICS),
        ("python/sglang_tiered/transfer/README.md", TRANSFER_METRICS),
    ],
)
def test_every_metric_is_documented_as_it_is(name: str, metrics: tuple[Metric, ...]) -> None:
    rows = table_rows(name, "metric")
    assert [tuple(cell.strip("`") for cell in row) for row in rows] == [
        (metric.name, metric.kind.value, ", ".join(metric.labels), metric.help)
        for metric in metrics
    ]


def test_code_map_names_places_that_exist() -> None:
    for row in table_rows("CONTRIBUTING.md", "where"):
        first = Path(row[0].split(",")[0].strip("` "))
        assert (ROOT / first).exists(), first
