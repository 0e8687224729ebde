"""Rows are cut as the file comes, in bounded memory, and damage ends with its row."""

from __future__ import annotations

import io
import json

import pytest

from sglang_tiered_lab.trace import rows as rows_module
from sglang_tiered_lab.trace.rows import Row, json_rows


def cut(text: str, max_bytes: int = 1 << 20) -> list[Row]:
    return list(json_rows(io.BytesIO(text.encode()), max_bytes=max_bytes))


def data(text: str) -> list[str]:
    return [row.data.decode() for row in cut(text) if not row.problem]


@pytest.fixture(params=[1, 7, 1 << 20])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(rows_module, "_CHUNK_BYTES", request.param)
    return int(request.param)


@pytest.mark.usefixtures("chunk_bytes")
def test_strings_hide_brackets_quotes_and_commas() -> None:
    values = [{"a": ']},"[{'}, {"b": '\\"]'}, {"c": "\\"}, {"d": [[], {}]}, {"é": "\n"}]
    for indent in (None, 1):
        assert [json.loads(text) for text in data(json.dumps(values, indent=indent))] == values


def test_a_long_row_never_hides_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_CHUNK_BYTES", 16)
    for length in range(500, 600):
        text = f'[{{"id": "{"x" * length}"}}, {{"id": 2}}, {{"id": 3}}]'
        kept = [row.data for row in cut(text, max_bytes=100) if not row.problem]
        assert kept[-2:] == [b'{"id": 2}', b'{"id": 3}'], length
