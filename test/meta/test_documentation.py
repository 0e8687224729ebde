"""The README's tables say what the code says."""

from __future__ import annotations

import ast
from pathlib import Path

from sglang_tiered.metrics import METRICS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def tier_flags() -> list[str]:
    """The keys of ``TIER_FLAGS``, read as text: this test needs no SGLang."""
    source = (ROOT / "python/sglang_tiered/integration/tier_flags.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TIER_FLAGS":
            assert isinstance(node.value, ast.Dict)
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError("TIER_FLAGS is not assigned at the top of tier_flags.py")


def table_rows(first_column: str) -> list[list[str]]:
    """The body of the README table whose header begins with a word."""
    lines = README.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_every_flag_is_documented_and_no_other() -> None:
    assert [row[0].strip("`") for row in table_rows("flag")] == tier_flags()


def test_every_metric_is_documented_as_it_is() -> None:
    documented = [tuple(cell.strip("`") for cell in row) for row in table_rows("metric")]
    assert documented == [
        (metric.name, metric.kind.value, ", ".join(metric.labels), metric.help)
        for metric in METRICS
    ]


def test_code_map_names_places_that_exist() -> None:
    for row in table_rows("where"):
        first = Path(row[0].split(",")[0].strip("` "))
        assert (ROOT / first).exists(), first
