"""Generated traces are the same from the same seed, and have the statistics they aim at."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from sglang_tiered_lab.trace import sharegpt_model
from sglang_tiered_lab.trace.cli import main
from sglang_tiered_lab.trace.figures import describe
from sglang_tiered_lab.trace.reader import read_trace


def generate(folder: Path, *flags: object) -> dict[str, bytes]:
    folder.mkdir()
    files = ("--sharegpt", folder / "a.json", "--mooncake", folder / "a.jsonl")
    assert main(["generate", *map(str, flags), *map(str, files)]) == 0
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_seed_decides_every_byte(tmp_path: Path) -> None:
    flags = ("--num-conversations", 50)
    first = generate(tmp_path / "first", *flags, "--seed", 3)
    assert first == generate(tmp_path / "again", *flags, "--seed", 3)
    other = generate(tmp_path / "other", *flags, "--seed", 4)
    assert first.keys() == other.keys()
    assert all(first[name] != other[name] for name in first)


def test_sharegpt_text_reads_like_a_downloaded_file(tmp_path: Path) -> None:
    files = generate(tmp_path / "made", "--num-conversations", 40, "--seed", 1)
    rows = json.loads(files["a.json"])
    assert len(rows) == 40
    speakers = {message["from"] for row in rows for message in row["conversations"]}
    assert speakers == {"human", "gpt", "system"}
    read = list(read_trace(tmp_path / "made" / "a.json"))
    written = list(read_trace(tmp_path / "made" / "a.jsonl"))
    key = [(request.conversation, request.turn, request.input_length) for request in read]
    assert sorted(key) == sorted((r.conversation, r.turn, r.input_length) for r in written)
    times = [request.arrival_s or 0.0 for request in written]
    assert times == sorted(times)
    assert describe(read)["ideal_hit_rate"] == describe(written)["ideal_hit_rate"]


def test_conversations_have_the_published_means() -> None:
    shape = sharegpt_model.Shape(num_conversations=2000)
    said = [json.loads(row)["conversations"] for row in sharegpt_model.rows(shape)]
    num_tokens = {
        speaker: [
            len(m["value"]) / 4 for messages in said for m in messages if m["from"] == speaker
        ]
        for speaker in ("human", "gpt")
    }
    num_turns = [sum(m["from"] == "gpt" for m in messages) for messages in said]
    multi_turn = sum(number > 1 for number in num_turns) / len(said)
    assert multi_turn == pytest.approx(sharegpt_model.MULTI_TURN, abs=0.02)
    assert mean(num_turns) == pytest.approx(sharegpt_model.MEAN_TURNS, rel=0.2)
    assert mean(num_tokens["human"]) == pytest.approx(sharegpt_model.QUESTION_TOKENS, rel=0.2)
    assert mean(num_tokens["gpt"]) == pytest.approx(sharegpt_model.ANSWER_TOKENS, rel=0.2)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.0), (1.0, 1.0)])
def test_system_prompts_have_the_share_asked_for(share: float, expected: float) -> None:
    shape = sharegpt_model.Shape(num_conversations=60, system_share=share, num_system_prompts=2)
    firsts = [json.loads(row)["conversations"][0] for row in sharegpt_model.rows(shape)]
    systems = [first["value"] for first in firsts if first["from"] == "system"]
    assert len(systems) / len(firsts) == expected
    assert len(set(systems)) <= 2
    assert all(len(text) == shape.system_tokens * 4 for text in systems)
