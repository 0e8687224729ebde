"""Files as people have them: what is damaged costs no more than itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_tiered.errors import TraceError
from sglang_tiered_lab.trace.reader import read_trace
from sglang_tiered_lab.trace.request import TraceRequest
from sglang_tiered_lab.trace.tally import Tally


def chat(*turns: tuple[Any, Any]) -> dict[str, Any]:
    return {"id": "a", "conversations": [{"from": who, "value": text} for who, text in turns]}


TALK = chat(("human", "hi"), ("gpt", "hello"), ("human", "more"), ("gpt", "no"))


def read(path: Path) -> tuple[list[TraceRequest], Tally]:
    tally = Tally(allow_dropped=True)
    return list(read_trace(path, tally=tally)), tally


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ([], "its list of conversations is empty"),
        ({"conversations": [{"from": "human"}]}, "no 'value' or 'content' or 'text'"),
        ({"conversations": [{"value": "x"}]}, "a message has no 'from' or 'role': message 1"),
        (chat(("human", "hi")), "its last question has no answer"),
        (chat(("gpt", "hi")), "begins with an answer"),
    ],
)
def test_a_bad_conversation_costs_no_other(tmp_path: Path, row: Any, what: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, (TALK, row, TALK))) + "]")
    requests, tally = read(path)
    assert len(requests) == 4
    assert (tally.num_rows, tally.num_skipped, tally.num_repaired) == (3, 1, 0)
    with pytest.raises(TraceError, match=what) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"row 2 (line 3) of {path} is not a ShareGPT request (")
    assert str(caught.value).endswith("; repair or remove it, or read without --strict.")
