"""What ``measure_codec_quality`` feeds the model, on the random demo model, and what it counts."""

from __future__ import annotations

import math

import pytest

import measure_codec_quality as quality


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
