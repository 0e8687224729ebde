"""The README's tables say what the code says."""

from __future__ import annotations

import ast
from pathlib import Path

from sglang_tiered.metrics import METRICS, TRANSFER_METRICS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def our_flags(table: str) -> list[str]:
    """The keys of ``TIER_FLAGS`` or ``TRANSFER_FLAGS``, read as text: this needs no SGLang."""
    source = (ROOT / "python/sglang_tiered/integration/tier_flags.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == table:
            assert isinstance(node.value, ast.Dict)
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError(f"{table} is not assigned at the top of tier_flags.py")


def table_rows(first_column: str, text: str = README) -> list[list[str]]:
    """The body of a table of the README, or of another text, whose header begins with a word."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_every_flag_is_documented_and_no_other() -> None:
    assert [row[0].strip("`") for row in table_rows("flag")] == our_flags("TIER_FLAGS")
    below = [row[0].strip("`") for row in table_rows("object flag")]
    assert below == our_flags("OBJECT_FLAGS")
    beside = [row[0].strip("`") for row in table_rows("peer flag")]
    assert beside == our_flags("PEER_FLAGS")
    transfer = [row[0].strip("`") for row in table_rows("transfer flag")]
    assert transfer == our_flags("TRANSFER_FLAGS")


def test_every_metric_is_documented_as_it_is() -> None:
    transfer = (ROOT / "python/sglang_tiered/transfer/README.md").read_text()
    for text, metrics in ((README, METRICS), (transfer, TRANSFER_METRICS)):
        rows = table_rows("metric", text)
        assert [tuple(cell.strip("`") for cell in row) for row in rows] == [
            (metric.name, metric.kind.value, ", ".join(metric.labels), metric.help)
            for metric in metrics
        ]


def test_code_map_names_places_that_exist() -> None:
    for row in table_rows("where"):
        first = Path(row[0].split(",")[0].strip("` "))
        assert (ROOT / first).exists(), first
