"""A hint is compared only where it brought the conversation, and once it has ended."""

from __future__ import annotations

import urllib.error
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.samples import make_bench, sample
from serving_bench import hinted
from serving_bench.client import Request, RequestFailedError
from serving_bench.hinted import AFTER_HINT
from serving_bench.setting import TINY

HISTORY = Request("a", (1, 2, 3), 1)


@pytest.mark.parametrize(("in_memory", "compares"), [(128, True), (64, False)])
def test_a_hint_that_brought_half_is_no_figure(
    tmp_path: Path, in_memory: int, compares: bool
) -> None:
    bench = make_bench(tmp_path, TINY, "tiered")
    one = {
        "stock": [sample(ttft_s=8.0, reusable=128)],
        "tiered": [sample(ttft_s=4.0, reusable=128, storage=128)],
        AFTER_HINT: [sample(ttft_s=1.0, reusable=128, host=in_memory)],
    }
    hinted._report(bench, [one, one])
    found = {name: figure["value"] for name, figure in bench.report.ratios.items()}
    wanted = {"hinted_ttft_over_nvme": 0.25, "hinted_ttft_over_stock": 0.125}
    assert found == (wanted if compares else {})


def fleet_that_answers(answers: list[Any]) -> Any:
    def request(path: str, body: dict[str, Any]) -> Any:
        assert (path, body["input_ids"]) == ("/tier/prefetch", [1, 2, 3])
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"num_tokens": 3, "num_in_memory": 3 - answer, "num_loading": answer}

    return {"tiered": SimpleNamespace(server=SimpleNamespace(request=request))}


def test_the_turn_waits_for_the_hint() -> None:
    answers = [3, 1, 0]
    hinted.bring_up(fleet_that_answers(answers), HISTORY)
    assert not answers


def test_a_refused_hint_ends_the_scenario() -> None:
    refusal = urllib.error.HTTPError("", 503, "memory is needed", Message(), None)
    with pytest.raises(RequestFailedError, match="refused"):
        hinted.bring_up(fleet_that_answers([3, refusal]), HISTORY)
