"""Generated traces are the same from the same seed, and have the statistics they aim at."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from sglang_tiered_lab.trace import sharegpt_model
from sglang_tiered_lab.trace.cli import main


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
