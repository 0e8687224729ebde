"""What ``measure_codec_quality`` feeds the model, on the random demo model, and what it counts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

import measure_codec_quality as quality
from sglang_tiered.demo.server import RANDOM, demo_model


@pytest.fixture(scope="module")
def judge() -> Iterator[quality.Judge]:
    with torch.inference_mode():
        yield quality.Judge(demo_model(RANDOM)[1])


def test_questions_asked_together_see_each_other(
    judge: quality.Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "DOCUMENT", 128)
    monkeypatch.setattr(quality, "QUESTIONS", ("Why?", "When was this written?"))
    piece = quality.Piece("text", judge.tokens("A page of some text. " * 10))
    prefix, questions = quality.document_prompts(judge, piece)
    assert len(prefix) == 128
    found = quality.answer(judge, piece)
    for name, kv in judge.variants(prefix).items():
        for question, together in zip(questions, found[name], strict=True):
            alone = judge.model.resume(kv, question, quality.NUM_NEW).tokens
            assert quality._until(alone, judge.end) == together, name


def test_perplexity_is_of_all_tokens_together() -> None:
    pieces = [
        {"nll": dict.fromkeys(quality.NAMES, nll) | {"fp8": nll + 5}, "same_best": same}
        for nll, same in ((512.0, dict.fromkeys(quality.NAMES, 512)), (1024.0, {}))
    ]
    pieces[1]["same_best"] = dict.fromkeys(quality.NAMES, 256)
    found = quality.figures({"perplexity": {"pieces": pieces}})
    assert found["perplexity_exact"]["value"] == pytest.approx(math.exp(1.5))
    assert found["perplexity_fp8_over_exact"]["value"] == pytest.approx(math.exp(5 / 512))
    assert found["same_best_token_int8"] == {"value": 0.75, "min": 0.5, "max": 1.0, "n": 2}
    row = {"codec": "fp8"}
    documents = [{"same_first": dict.fromkeys(quality.NAMES, 9), "other": [row, row]}]
    counted = quality.figures({"answers": {"documents": documents}})
    assert counted["equal_answers_fp8"]["value"] == len(quality.QUESTIONS) - 2
    assert counted["equal_first_tokens_int8"]["value"] == 9
