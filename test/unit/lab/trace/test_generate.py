"""Generated traces are the same from the same seed, and have the statistics they aim at."""

from __future__ import annotations

import json
from statistics import mean

import pytest

from sglang_tiered_lab.trace import sharegpt_model


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
