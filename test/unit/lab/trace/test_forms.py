"""What people have: each form of conversations and of traces is read to what is in it."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_tiered.errors import ConfigError, TraceError
from sglang_tiered_lab.trace.block_size import infer_block_tokens
from sglang_tiered_lab.trace.forms import Format
from sglang_tiered_lab.trace.mooncake import encode
from sglang_tiered_lab.trace.reader import read_trace
from sglang_tiered_lab.trace.request import TraceRequest
from sglang_tiered_lab.trace.reuse import measure
from sglang_tiered_lab.trace.tally import Tally

QUESTION, ANSWER = "How long is a page? " * 9, "As long as it takes. " * 7


def read(path: Path, content: Any, **options: Any) -> tuple[list[TraceRequest], Tally]:
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    tally = Tally()
    return list(read_trace(path, tally=tally, **options)), tally


# ---- Conversations ----

SHAREGPT = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]
OPENAI = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": ANSWER}]},
]


@pytest.mark.parametrize("turns", [SHAREGPT, OPENAI, PARTS])
@pytest.mark.parametrize(
    "file",
    [
        lambda turns: json.dumps([{"id": "c", "conversations": turns}]),
        lambda turns: json.dumps([{"id": "c", "messages": turns}], indent=2),
        lambda turns: json.dumps({"messages": turns, "id": "c"}, indent=2),
        lambda turns: json.dumps({"id": "c", "items": turns}) + "\n",
        lambda turns: json.dumps({"id": "c", "conversation": turns}),
        lambda turns: json.dumps({"c": {"conversations": turns}}),
        lambda turns: json.dumps({"c": {"conversations": turns}}, indent=1),
        lambda turns: json.dumps({"c": turns}, indent=1),
        lambda turns: json.dumps({"data": [{"id": "c", "messages": turns}]}),
        lambda turns: gzip.compress(json.dumps([{"id": "c", "messages": turns}]).encode()),
    ],
)
def test_every_form_holds_the_same_turns(
    tmp_path: Path, file: Callable[[Any], str | bytes], turns: Any
) -> None:
    (one,), tally = read(tmp_path / "file", file(turns))
    (plain,), _ = read(tmp_path / "plain", json.dumps([{"id": "c", "conversations": SHAREGPT}]))
    assert one == plain
    assert (one.conversation, one.turn, tally.summary()) == ("c", 1, None)


def test_what_tools_say_belongs_to_the_prompt(tmp_path: Path) -> None:
    said = [
        {"from": "system", "value": "Be short."},
        {"from": "human", "value": QUESTION},
        {"from": "function_call", "value": "{}"},
        {"from": "observation", "value": "42"},
        {"from": "gpt", "value": ANSWER},
    ]
    (call, answer), tally = read(tmp_path / "file", [{"id": "c", "conversations": said}])
    assert (call.turn, answer.turn, tally.summary()) == (1, 2, None)
    assert answer.input_length > call.input_length + call.output_length
    openai = [
        {"role": "developer", "content": None},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {}}]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
        {"role": "assistant", "content": ANSWER},
    ]
    requests, tally = read(tmp_path / "file", [{"messages": openai}])
    assert [request.turn for request in requests] == [1, 2]
    assert tally.summary() is None
    assert requests[0].output_length == -(-len(json.dumps(openai[2]["tool_calls"])) // 4)


def test_a_null_turn_costs_that_turn_only(tmp_path: Path) -> None:
    said = [*SHAREGPT, SHAREGPT[0], {"from": "gpt", "value": None}]
    rows = [{"id": f"c{number}", "conversations": said} for number in range(4)]
    requests, tally = read(tmp_path / "file", json.dumps(rows))
    assert [request.turn for request in requests] == [1] * 4
    assert (tally.num_skipped, tally.num_repaired) == (0, 4)
    assert "4 used in part: 4 as the 'value' of a message is null" in str(tally.summary())


def test_different_pictures_are_different_prompts(tmp_path: Path) -> None:
    def row(picture: str) -> dict[str, Any]:
        parts = [
            {"type": "image_url", "image_url": {"url": picture}},
            {"type": "text", "text": "?"},
        ]
        return {"messages": [{"role": "user", "content": parts}, OPENAI[1]]}

    (one, same, other), _ = read(tmp_path / "file", [row("a"), row("a"), row("b")])
    assert one.block_ids == same.block_ids != other.block_ids


def test_recorded_requests_need_no_answer(tmp_path: Path) -> None:
    rows = [
        {"session_id": "s", "timestamp": 500, "messages": OPENAI[:1], "output_length": 7},
        {"session_id": "s", "delay": 250, "messages": [*OPENAI, OPENAI[0]], "output_length": 8},
    ]
    (first, second), tally = read(tmp_path / "file", rows)
    assert tally.summary() is None
    assert (first.conversation, first.output_length, first.arrival_s) == ("s", 7, 0.5)
    assert (second.conversation, second.output_length, second.arrival_s) == ("s", 8, 0.75)
    assert second.input_length > 2 * first.input_length - 8
    payloads = [
        {"messages": row["messages"], "max_completion_tokens": row["output_length"]} for row in rows
    ]
    inputs = json.dumps({"data": [{"session_id": "s", "payloads": payloads}]}, indent=2)
    sent, tally = read(tmp_path / "file", inputs)
    assert tally.summary() is None
    turns = [("s", 1, first.block_ids), ("s", 2, second.block_ids)]
    assert [(one.conversation, one.turn, one.block_ids) for one in sent] == turns


def test_parquet_is_read_like_json(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"id": f"c{number}", "messages": OPENAI} for number in range(200)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "file.parquet")
    assert list(read_trace(tmp_path / "file.parquet")) == read(tmp_path / "file", rows)[0]
    blocks = [{"timestamp": 7, "input_length": 513, "output_length": 2, "hash_ids": [4, 9]}]
    parquet.write_table(pyarrow.Table.from_pylist(blocks), tmp_path / "blocks.parquet")
    assert list(read_trace(tmp_path / "blocks.parquet")) == read(tmp_path / "file", blocks)[0]
    parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(TraceError, match="in no known format \\(its columns are 'a'\\)"):
        read_trace(tmp_path / "other.parquet")
    whole = (tmp_path / "file.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"cannot be read as Parquet .*; check it"):
        read_trace(tmp_path / "cut.parquet")


def test_parquet_without_its_package_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pyarrow" else found(name)
    )
    (tmp_path / "file").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"a Parquet file, needs .*sglang-tiered\[parquet\]'\.$"):
        read_trace(tmp_path / "file")


def test_all_reasons_are_told_with_counts(tmp_path: Path) -> None:
    good = {"conversations": SHAREGPT}
    rows = [
        *[{"conversations": []}] * 3,
        *[{"conversations": [{"from": "nobody", "value": "x"}]}] * 2,
        {"conversations": "none"},
        *[{"conversations": [*SHAREGPT, SHAREGPT[0]]}] * 4,
        *[good] * 90,
    ]
    _, tally = read(tmp_path / "file", rows)
    said = str(tally.summary())
    assert said.startswith("6 of 100 rows dropped and 4 used in part: ")
    for reason in (
        "4 as its last question has no answer (the first: line 7 of",
        "3 as its list of conversations is empty (the first: line 1 of",
        "2 as a message is from 'nobody', which is no speaker (the first: line 4 of",
        "1 as its conversations are a string, not a list (the first: line 6 of",
    ):
        assert reason in said
    assert "\n" not in said


def test_reasons_have_a_bound(tmp_path: Path) -> None:
    rows = [{"conversations": [{"from": f"x{n}", "value": ""}]} for n in range(500)]
    rows += [{"conversations": SHAREGPT}] * 4500
    assert "480 as other reasons" in str(read(tmp_path / "file", rows)[1].summary())


def test_a_tenth_may_be_dropped_and_no_more(tmp_path: Path) -> None:
    good, bad = {"conversations": SHAREGPT}, {"conversations": []}
    requests, _ = read(tmp_path / "file", [*[bad] * 10, *[good] * 90])
    assert len(requests) == 90
    with pytest.raises(TraceError, match=r"11 of 100 rows dropped: .* --allow-dropped\.$"):
        read(tmp_path / "file", [*[bad] * 11, *[good] * 89])


# ---- Traces of blocks ----


def blocks(ids: list[Any], length: float, second: int = 0, **others: Any) -> dict[str, Any]:
    return {
        "timestamp": 1000 * second,
        "input_length": length,
        "output_length": 5,
        "hash_ids": ids,
        **others,
    }


@pytest.mark.parametrize("size", [16, 48, 64, 100, 128, 512, 1024])
@pytest.mark.parametrize("whole", [False, True])
def test_block_sizes_are_inferred_and_said(tmp_path: Path, size: int, whole: bool) -> None:
    rows = []
    for number in range(200):
        length = 3 * size + 131 * number + 1
        count = length // size if whole else -(-length // size)
        own = range(1000 * number, 1000 * number + count - 3)
        rows.append(blocks([0, 1, 2, *own], length, number))
    requests, tally = read(tmp_path / "file", rows)
    assert {request.block_tokens for request in requests} == {size}
    assert len(requests) == 200
    assert sum(measure(requests).request_hits()) == 3 * 199
    said = f"its blocks are taken to have {size} tokens"
    assert [said in note for note in tally.notes] == ([] if size == 512 else [True])


def test_a_given_block_size_is_taken(tmp_path: Path) -> None:
    rows = [blocks([7], 10, second) for second in range(3)]
    assert {one.block_tokens for one in read(tmp_path / "file", rows)[0]} == {512}
    assert {one.block_tokens for one in read(tmp_path / "f", rows, block_tokens=32)[0]} == {32}
    own = [{**row, "block_size": 24} for row in rows]
    assert {one.block_tokens for one in read(tmp_path / "f", own, block_tokens=32)[0]} == {24}
    with pytest.raises(
        TraceError, match="in blocks of 4 tokens .*none is left: check .*--trace-block-tokens"
    ):
        read(tmp_path / "f", rows, block_tokens=4)


def test_any_names_of_blocks_share_what_they_share(tmp_path: Path) -> None:
    chains = [[0, 1, 2], [0, 1, 3], [4], [0, 1, 2, 5]]
    plain = [blocks(chain, 512 * len(chain), at) for at, chain in enumerate(chains)]
    wanted = measure(read(tmp_path / "a", plain)[0]).request_hits().tolist()
    names: list[Callable[[int], Any]] = [str, lambda n: f"{n:016x}", lambda n: -1 - n]
    names += [lambda n: (1 << 64) + n, lambda n: (1 << 63) + n]
    for name in names:
        rows = [{**row, "hash_ids": list(map(name, row["hash_ids"]))} for row in plain]
        requests, tally = read(tmp_path / "b", rows)
        assert measure(requests).request_hits().tolist() == wanted
        assert tally.summary() is None


def test_the_rest_of_a_prompt_is_never_shared(tmp_path: Path) -> None:
    rows = [blocks([1, 2], 1100, second) for second in range(3)]
    requests, _ = read(tmp_path / "file", rows)
    assert measure(requests).request_hits().tolist() == [0, 2, 2]
    again, _ = read(tmp_path / "file", rows)
    assert again == requests


def test_float_lengths_are_whole_numbers(tmp_path: Path) -> None:
    (request,), _ = read(tmp_path / "file", [blocks([1, 2], 600.0)])
    assert request.input_length == 600
    assert isinstance(request.input_length, int)
    with pytest.raises(TraceError, match="its input_length is not a whole number"):
        read(tmp_path / "file", [blocks([1, 2], 600.5)])


def test_later_turns_come_after_their_answers(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for session in range(3):
        for turn in range(4):
            ids = list(range(10 * session, 10 * session + turn + 1))
            row = blocks(ids, 512 * len(ids), session, session_id=f"s{session}")
            if turn:
                del row["timestamp"]
                row["delay"] = 2500
            rows.append(row)
    requests, tally = read(tmp_path / "file", rows)
    assert tally.summary() is None
    assert [one.arrival_s for one in requests[4:8]] == [1.0, 3.5, 6.0, 8.5]
    assert [one.delay_s for one in requests[4:8]] == [None, 2.5, 2.5, 2.5]
    assert len({one.conversation for one in requests}) == 3
    assert measure(requests).hit_rate() == 18 / 30
    lost = [row for row in rows if "timestamp" not in row]
    with pytest.raises(TraceError, match="nor a request of its session before it"):
        read(tmp_path / "file", [{**rows[0], "session_id": "other"}, *lost])
    untimed, _ = read(tmp_path / "file", lost)
    assert {one.arrival_s for one in untimed} == {None}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "\xff",
        json.dumps(blocks([4, 9], -1)),
        json.dumps(blocks([4, 9], 513)).replace("513", '"513"'),
        json.dumps(blocks([4, 9, 1], 513)),
        json.dumps(blocks([], 513)),
        json.dumps(blocks([4, None], 513)),
        json.dumps({"timestamp": 0, "input_length": 5, "output_length": 5}),
    ],
)
def test_a_bad_line_is_named_in_one_sentence(tmp_path: Path, line: str) -> None:
    good = json.dumps(blocks([4, 9], 513, 7))
    (tmp_path / "file").write_text(f"{good}\n\n" + f"{good}\n" * 9 + line)
    requests = read_trace(tmp_path / "file")
    assert [next(requests).arrival_s for _ in range(10)] == [7] * 10
    with pytest.raises(TraceError, match=r"^line 12 of .*file is not a Mooncake request") as caught:
        next(requests)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_what_is_written_never_joins_sessions(tmp_path: Path) -> None:
    """Other readers append the rows of one ``session_id`` to each other."""
    row = blocks([1, 2], 600, session_id="s", turn=2, delay=9)
    (request,), _ = read(tmp_path / "file", [row])
    written = json.loads(encode(request))
    assert "session_id" not in written
    assert read(tmp_path / "file", [written])[0] == [request]


def test_bailian_ids_name_contents_by_sixteen(tmp_path: Path) -> None:
    def row(chat: int, parent: int, ids: list[int], at_s: float) -> dict[str, Any]:
        return {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": at_s,
            "input_length": 16 * len(ids) - 3,
            "output_length": 9,
            "type": "text",
            "turn": 1 if parent < 0 else 2,
            "hash_ids": ids,
        }

    rows = [row(5, -1, [1, 2], 0.5), row(9, 5, [1, 2, 3], 61.25), row(7, -1, [4, 2, 3], 62.0)]
    requests, tally = read(tmp_path / "file", rows)
    assert tally.summary() is None
    assert [one.arrival_s for one in requests] == [0.5, 61.25, 62.0]
    assert {one.block_tokens for one in requests} == {16}
    assert [one.conversation for one in requests] == ["5", "5", "7"]
    assert [one.turn for one in requests] == [1, 2, 1]
    first, second, third = (one.block_ids for one in requests)
    assert second[:2] == first
    assert not set(third) & set(second), "equal blocks behind different ones are different"


AZURE_TIMES = [
    ("18:15:46.6805900", "18:15:50.9951690"),
    ("00:00:00.009930+00:00", "00:00:04.324509+00:00"),
]


@pytest.mark.parametrize("times", AZURE_TIMES)
def test_azure_rows_share_nothing(tmp_path: Path, times: tuple[str, str]) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 {time},{600 + place},{7 + place}" for place, time in enumerate(times)]
    (one, other), tally = read(tmp_path / "file", "\r\n".join(lines) + "\r\n")
    assert (one.arrival_s, other.arrival_s) == pytest.approx((0.0, 4.314579), abs=1e-5)
    lengths = [(each.input_length, each.output_length) for each in (one, other)]
    assert lengths == [(600, 7), (601, 8)]
    assert not set(one.block_ids) & set(other.block_ids)
    assert tally.num_rows == 2
    assert "says nothing of prompts but their length" in tally.notes[0]
    with pytest.raises(TraceError, match="its ContextTokens is not a number of tokens"):
        read(tmp_path / "file", "\n".join([*lines, "2023-11-16 18:16:00,x,1"]))


def test_the_format_of_a_file_is_told(tmp_path: Path) -> None:
    for content, title in (
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", Format.AZURE),
        (json.dumps({"chat_id": 1, **blocks([1], 5)}), Format.BAILIAN),
        (json.dumps(blocks([1], 5, text='{"chat_id": "x"}')), Format.MOONCAKE),
        (json.dumps({"messages": [{"role": "user", "content": '"hash_ids": []'}]}), None),
    ):
        (tmp_path / "file").write_text(content + "\n{\n")
        with pytest.raises(TraceError, match=f"not an? {(title or Format.SHAREGPT).title} request"):
            list(read_trace(tmp_path / "file"))


def test_a_rounder_size_is_inferred_first() -> None:
    assert infer_block_tokens([], 512) == 512
    assert infer_block_tokens([(120, 8)] * 12, 512) == 16
    assert infer_block_tokens([(300, 1), (20, 1)], 512) == 512
    assert infer_block_tokens([(1100, 1), (20, 1)], 512) == 2048
    assert infer_block_tokens([(9, 3), (7, 3)], 512) == 3
    assert infer_block_tokens([(5, 90)], 512) == 1
