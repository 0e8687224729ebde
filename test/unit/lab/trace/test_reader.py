"""Files as people have them: each format, its damage, and what is no trace at all."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_tiered.errors import TraceError
from sglang_tiered_lab.trace.reader import read_trace
from sglang_tiered_lab.trace.request import TraceRequest
from sglang_tiered_lab.trace.tally import Tally

MOONCAKE = '{"timestamp": 7, "input_length": 513, "output_length": 2, "hash_ids": [4, 9]}\n'


def chat(*turns: tuple[Any, Any]) -> dict[str, Any]:
    return {"id": "a", "conversations": [{"from": who, "value": text} for who, text in turns]}


TALK = chat(("human", "hi"), ("gpt", "hello"), ("human", "more"), ("gpt", "no"))


def written(tmp_path: Path, content: str | bytes | list[Any]) -> Path:
    path = tmp_path / "trace.json"
    if isinstance(content, list):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path, **options: Any) -> tuple[list[TraceRequest], Tally]:
    tally = Tally(allow_dropped=True)
    return list(read_trace(path, tally=tally, **options)), tally


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
    path = written(tmp_path, "[\n" + json.dumps(TALK) + ",\n" + json.dumps(row) + ",\n")
    with path.open("a") as file:
        file.write(json.dumps(TALK) + "]")
    requests, tally = read(path)
    assert len(requests) == 4
    assert (tally.num_rows, tally.num_skipped, tally.num_repaired) == (3, 1, 0)
    with pytest.raises(TraceError, match=what) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"row 2 (line 3) of {path} is not a ShareGPT request (")
    assert str(caught.value).endswith("; repair or remove it, or read without --strict.")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (gzip.compress(MOONCAKE.encode() * 99, mtime=0)[:-20], "is damaged or cut off"),
        (b"\x1f\x8b" + b"x" * 99, "is damaged or cut off"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer"),
        (b'{"a": 1}\n', r"is in no known format \(line 1 begins with '{\"a\": 1}'\)"),
    ],
)
def test_what_is_no_trace_is_one_sentence(tmp_path: Path, content: bytes, what: str) -> None:
    with pytest.raises(TraceError, match=what) as caught:
        read(written(tmp_path, content))
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
