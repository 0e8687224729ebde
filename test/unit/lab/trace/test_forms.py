"""What people have: each form of conversations and of traces is read to what is in it, and what is
damaged costs no more than itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_tiered.errors import TraceError
from sglang_tiered_lab.trace.reader import read_trace
from sglang_tiered_lab.trace.request import TraceRequest
from sglang_tiered_lab.trace.reuse import measure
from sglang_tiered_lab.trace.tally import Tally


def read(path: Path, content: Any, **how: Any) -> tuple[list[TraceRequest], Tally]:
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_text(content)
    tally = Tally(**how)
    return list(read_trace(path, tally=tally)), tally


def blocks(ids: list[Any], length: float, second: int = 0, **others: Any) -> dict[str, Any]:
    return {
        "timestamp": 1000 * second,
        "input_length": length,
        "output_length": 5,
        "hash_ids": ids,
        **others,
    }


def test_parquet_is_read_like_json(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    talk = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    for rows in ([{"id": f"c{n}", "messages": talk} for n in range(200)], [blocks([4, 9], 513)]):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "file.parquet")
        assert list(read_trace(tmp_path / "file.parquet")) == read(tmp_path / "file", rows)[0]
    whole = (tmp_path / "file.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"cannot be read as Parquet .*; check it"):
        read_trace(tmp_path / "cut.parquet")


@pytest.mark.parametrize("size", [16, 100, 512])
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
        "\xff",
        json.dumps(blocks([4, 9], 513)).replace("513", '"513"'),
        json.dumps(blocks([4, 9, 1], 513)),
        json.dumps(blocks([4, None], 513)),
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


def chat(*turns: tuple[Any, Any]) -> dict[str, Any]:
    return {"id": "a", "conversations": [{"from": who, "value": text} for who, text in turns]}


TALK = chat(("human", "hi"), ("gpt", "hello"), ("human", "more"), ("gpt", "no"))


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
    text = "[\n" + ",\n".join(map(json.dumps, (TALK, row, TALK))) + "]"
    requests, tally = read(path, text, allow_dropped=True)
    assert len(requests) == 4
    assert (tally.num_rows, tally.num_skipped, tally.num_repaired) == (3, 1, 0)
    with pytest.raises(TraceError, match=what) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"row 2 (line 3) of {path} is not a ShareGPT request (")
    assert str(caught.value).endswith("; repair or remove it, or read without --strict.")


def test_bailian_ids_name_contents_by_sixteen(tmp_path: Path) -> None:
    def row(chat: int, parent: int, ids: list[int], at_s: float) -> dict[str, Any]:
        return {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": at_s,
            "input_length": 16 * len(ids) - 3,
            "output_length": 9,
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


def test_azure_rows_share_nothing(tmp_path: Path) -> None:
    times = "18:15:46.6805900", "18:15:50.9951690"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 {time},{600 + place},{7 + place}" for place, time in enumerate(times)]
    (one, other), tally = read(tmp_path / "file", "\r\n".join(lines) + "\r\n")
    assert (one.arrival_s, other.arrival_s) == pytest.approx((0.0, 4.314579), abs=1e-5)
    lengths = [(each.input_length, each.output_length) for each in (one, other)]
    assert lengths == [(600, 7), (601, 8)]
    assert not set(one.block_ids) & set(other.block_ids)
    assert tally.num_rows == 2
    with pytest.raises(TraceError, match="its ContextTokens is not a number of tokens"):
        read(tmp_path / "file", "\n".join([*lines, "2023-11-16 18:16:00,x,1"]))
