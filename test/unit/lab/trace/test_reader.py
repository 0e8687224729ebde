"""Files as people have them: each format, its damage, and what is no trace at all."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from sglang_tiered.errors import TraceError
from sglang_tiered_lab.trace.forms import Format
from sglang_tiered_lab.trace.reader import read_trace
from sglang_tiered_lab.trace.request import TraceRequest
from sglang_tiered_lab.trace.tally import Tally
from sglang_tiered_lab.trace.text import Tokens

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


def test_mooncake_lines_become_requests(tmp_path: Path) -> None:
    (request,), _ = read(written(tmp_path, MOONCAKE))
    assert (request.arrival_s, request.block_tokens) == (0.007, 512)
    assert (request.input_length, request.output_length) == (513, 2)
    assert request.block_ids == (4, 9)
    assert request.conversation is request.turn is request.tenant is None
    more = {"input_length": 30, "block_size": 16, "session_id": 3, "turn": 2, "tenant": "t"}
    (request,), _ = read(written(tmp_path, json.dumps({**json.loads(MOONCAKE), **more})))
    assert request.block_tokens == 16
    assert (request.conversation, request.turn, request.tenant) == ("3", 2, "t")


def test_a_conversation_is_its_turns_over_its_history(tmp_path: Path) -> None:
    tokens = Tokens(block_tokens=4, bytes_per_token=1)
    first, second = read(written(tmp_path, [TALK]), tokens=tokens)[0]
    history = len("<|user|>\nhi\n<|assistant|>\n")
    assert (first.turn, first.input_length, first.output_length) == (1, history, 5)
    more = len("hello\n<|user|>\nmore\n<|assistant|>\n")
    assert (second.turn, second.input_length, second.output_length) == (2, history + more, 2)
    assert first.conversation == second.conversation == "a"
    assert first.arrival_s is None
    full = history // 4
    assert first.block_ids[:full] == second.block_ids[:full]
    assert first.block_ids[full:] != second.block_ids[full : full + 1]


def test_only_equal_system_prompts_share_blocks(tmp_path: Path) -> None:
    rows = [
        chat(("system", prompt * 20), ("human", question), ("gpt", "x"))
        for prompt, question in (("abcd", "1"), ("abcd", "2"), ("abce", "1"))
    ]
    one, two, three = read(written(tmp_path, rows), tokens=Tokens(8, 1))[0]
    assert one.block_ids[:11] == two.block_ids[:11]
    assert one.block_ids[11:] != two.block_ids[11:]
    assert not set(one.block_ids[2:]) & set(three.block_ids)


def test_tokens_are_bytes_over_the_estimate_rounded_up(tmp_path: Path) -> None:
    row = chat(("human", "ä" * 50), ("gpt", "12345"))
    (by_one,), _ = read(written(tmp_path, [row]), tokens=Tokens(512, 1))
    (by_four,), _ = read(written(tmp_path, [row]))
    assert by_one.input_length == len("<|user|>\n\n<|assistant|>\n") + 100
    assert by_four.input_length == -(-by_one.input_length // 4)
    assert by_four.output_length == 2


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"id": "x"}, "no conversations"),
        ({"conversations": 3}, "a number, not a list"),
        ([], "its list of conversations is empty"),
        (None, "not an object|no conversation"),
        (7, "not an object|no conversation"),
        (chat() | {"conversations": ["hi"]}, "a message is a string, not an object: message 1"),
        ({"conversations": [{"from": "human"}]}, "no 'value' or 'content' or 'text'"),
        ({"conversations": [{"value": "x"}]}, "a message has no 'from' or 'role': message 1"),
        (chat(("human", None)), "the 'value' of a message is null"),
        (chat((1, "x")), "the 'from' of a message is a number"),
        (chat(("nobody", "x")), "'nobody', which is no speaker"),
        (chat(("human", "hi")), "its last question has no answer"),
        (chat(("gpt", "hi")), "begins with an answer"),
        (chat(("system", "s")), "it has no answer"),
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
    ("turns", "outputs", "what"),
    [
        ((("gpt", "old"), ("human", "q"), ("gpt", "yes")), [3], "begins with an answer"),
        ((("human", "q"), ("gpt", "yes"), ("gpt", "no")), [5], "two answers in a row"),
        ((("human", "q"), ("gpt", "yes"), ("human", "r")), [3], "last question"),
        ((("human", "q"), ("human", "r"), ("gpt", "yes")), [3], None),
        ((("system", "s"), ("human", "q"), ("gpt", "")), [0], None),
        ((("system", "s"), ("gpt", "hi"), ("human", "q"), ("gpt", "a")), [1], "begins with"),
    ],
)
def test_a_conversation_is_used_until_it_breaks(
    tmp_path: Path, turns: tuple[tuple[str, str], ...], outputs: list[int], what: str | None
) -> None:
    requests, tally = read(written(tmp_path, [chat(*turns)]), tokens=Tokens(512, 1))
    assert [request.output_length for request in requests] == outputs
    assert tally.num_repaired == (what is not None)
    assert tally.num_skipped == 0
    assert what is None or what in next(iter(tally.reasons))


def test_lone_surrogates_and_long_numbers_are_read(tmp_path: Path) -> None:
    text = r'[{"id": 1e999, "conversations": [{"from": "human", "value": "\ud800!"},'
    text += r' {"from": "gpt", "value": "\udc00"}]}]'
    (request,), tally = read(written(tmp_path, text), tokens=Tokens(512, 1))
    assert tally.num_skipped == 0
    assert request.output_length == 3
    assert request.conversation == "row-1"


@pytest.mark.parametrize(
    "damage",
    [
        ('"value": "hello"', '"value": "hello'),  # a quote is missing
        ('"value": "hello"}', '"value": "hello"'),  # a brace
        ('"no"}]', '"no"}'),  # a bracket
        ('"from"', "from"),
        (', {"from": "gpt", "value": "hello"}', ", {,}"),
    ],
)
def test_damage_in_a_row_costs_that_row_only(tmp_path: Path, damage: tuple[str, str]) -> None:
    rows = [json.dumps(TALK) for _ in range(5)]
    rows[1] = rows[1].replace(*damage, 1)
    assert rows[1] != rows[0]
    requests, tally = read(written(tmp_path, "[" + ",\n".join(rows) + "]"))
    assert len(requests) == 8
    assert tally.num_skipped in (1, 2)


def test_a_file_cut_off_is_used_until_there(tmp_path: Path) -> None:
    whole = json.dumps([TALK] * 3)
    for cut in (len(whole) - 1, len(whole) - 2, len(whole) - 20):
        requests, tally = read(written(tmp_path, whole[:cut]))
        assert len(requests) == (6 if cut == len(whole) - 1 else 4)
        assert tally.num_skipped == 1
        assert "the file ends" in next(iter(tally.reasons))


def test_either_format_may_be_lines_or_array(tmp_path: Path) -> None:
    lines = json.dumps(TALK) + "\n{\n" + json.dumps(TALK) + "\n"
    requests, tally = read(written(tmp_path, lines))
    assert (len(requests), tally.num_skipped) == (4, 1)
    assert f"(the first: line 2 of {tmp_path / 'trace.json'})" in str(tally.summary())
    requests, _ = read(written(tmp_path, f"[{MOONCAKE},{MOONCAKE}]"))
    assert len(requests) == 2
    for content in (MOONCAKE, json.dumps([TALK])):
        _, tally = read(written(tmp_path, b"\xef\xbb\xbf" + content.encode()))
        assert tally.num_skipped == 0, "a byte order mark is skipped"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), "is gzip-compressed twice; unpack"),
        (gzip.compress(MOONCAKE.encode() * 99, mtime=0)[:-20], "is damaged or cut off"),
        (b"\x1f\x8b" + b"x" * 99, "is damaged or cut off"),
        (b"PAR1" + b"x" * 99, "cannot be read as Parquet"),
        (b"PK\x03\x04rest", "is a zip archive"),
        ("{}".encode("utf-16"), "is UTF-16"),
        (b"\x7fELF\x00\x01", "is a binary file"),
        (b"<!DOCTYPE html>", "looks like a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer"),
        (b'{"a": 1}\n', r"is in no known format \(line 1 begins with '{\"a\": 1}'\)"),
        (b"time,length\n1,2\n", "is in no known format"),
    ],
)
def test_what_is_no_trace_is_one_sentence(tmp_path: Path, content: bytes, what: str) -> None:
    with pytest.raises(TraceError, match=what) as caught:
        read(written(tmp_path, content))
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message


def test_a_format_may_be_given(tmp_path: Path) -> None:
    path = written(tmp_path, '{"a": 1}\n')
    requests, tally = read(path, format=Format.MOONCAKE)
    assert (requests, tally.num_skipped) == ([], 1)
    assert "line 1" in str(tally.summary())
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(TraceError, match="not a regular file"):
        read_trace(tmp_path / "fifo")  # which is not waited for


def test_where_a_trace_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data" / "mooncake"
    folder.mkdir(parents=True)
    (folder / "one.jsonl").write_text(MOONCAKE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match="set SGLANG_TIERED_DATA"):
        read_trace()
    with pytest.raises(TraceError, match="No such file.*SGLANG_TIERED_DATA"):
        read_trace((folder / "one.jsonl").relative_to(tmp_path / "data"))
    monkeypatch.setenv("SGLANG_TIERED_DATA", str(tmp_path / "data"))
    assert len(list(read_trace((folder / "one.jsonl").relative_to(tmp_path / "data")))) == 1
    assert len(list(read_trace())) == 1
    (folder / "two.jsonl").write_text(MOONCAKE)
    with pytest.raises(TraceError, match=r"is a folder; name one.*one\.jsonl, mooncake/two\.jsonl"):
        read_trace()
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(TraceError, match=r"without \.json, \.jsonl, \.csv or \.parquet"):
        read_trace()


def test_progress_reaches_the_end_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE * 3)
    told: list[int] = []
    assert len(list(read_trace(path, on_bytes=told.append))) == 3
    assert told == sorted(told)
    assert told[-1] == path.stat().st_size
