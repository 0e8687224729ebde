"""What a generated trace aims at, beside what it reached.

Every aim of the Mooncake shape was computed from the published conversation trace with the tools of
this package; those of the ShareGPT shape are in ``sharegpt_model``. A share is held to two points,
a length or time to a fifth, the tolerances of the acceptance test in the generator recipe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from sglang_tiered.trace.arrivals import GAP_MEDIAN_S
from sglang_tiered.trace.figures import describe
from sglang_tiered.trace.generator import sharegpt_model
from sglang_tiered.trace.reuse import measure
from sglang_tiered.trace.text import BYTES_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered.trace.request import TraceRequest

__all__ = ["Figure", "ShareGptCounts", "of_mooncake", "of_sharegpt"]

_POINTS = 0.02
_PART = 0.2

_LRU_AIMS = {1000: 0.044, 3000: 0.065, 10_000: 0.211, 30_000: 0.326, 50_000: 0.355, 100_000: 0.364}
_INPUT_AIMS = {"p10": 964, "p25": 2306, "p50": 6909, "p75": 15367, "p90": 27367, "p99": 85400}
_OUTPUT_AIMS = {"p10": 24, "p25": 156, "p50": 350, "p75": 472, "p90": 597, "p99": 1119}
_GAP_AIMS = {"p25": 54, "p50": 114, "p75": 267, "p90": 519, "p99": 1578}
_TURN_AIMS = {"1": 0.659, "2": 0.168, "3": 0.069, "4": 0.034, "5": 0.020}
_TOP_AIMS = {"1%": 0.316, "5%": 0.577, "10%": 0.751, "20%": 0.928}


class Figure(NamedTuple):
    name: str
    aim: float
    reached: float
    is_share: bool

    @property
    def is_met(self) -> bool:
        tolerance = _POINTS if self.is_share else _PART * self.aim
        return abs(self.reached - self.aim) <= tolerance

    def row(self) -> tuple[str, str, str, str]:
        form = "{:.1%}" if self.is_share else "{:,.0f}" if self.aim >= 20 else "{:.2f}"
        met = "yes" if self.is_met else "no"
        return self.name, form.format(self.aim), form.format(self.reached), met


def of_mooncake(requests: Sequence[TraceRequest]) -> list[Figure]:
    """Of a whole trace: fewer conversations than the published one has reach less reuse."""
    # Turns are inferred, as those of the published trace were.
    anonymous = [
        msgspec.structs.replace(request, conversation=None, turn=None) for request in requests
    ]
    reached: dict[str, Any] = describe(anonymous)
    reuse = measure(anonymous)
    shares = [
        ("ideal hit rate", 0.366, reached["ideal_hit_rate"]),
        ("requests that hit at most one block", 0.613, reached["at_most_one_hit_share"]),
        ("blocks seen once", 0.758, reached["seen_once_share"]),
        *(
            (f"reuses of the top {top} of blocks", aim, (reached["top_reuse_share"] or {}).get(top))
            for top, aim in _TOP_AIMS.items()
        ),
        *(
            (f"LRU hit rate at {blocks:,} blocks", aim, reuse.hit_rate(blocks))
            for blocks, aim in _LRU_AIMS.items()
        ),
        *(
            (f"requests in turn {turn}", aim, reached["turns"]["share"][turn])
            for turn, aim in _TURN_AIMS.items()
        ),
    ]
    sizes = [
        (f"{title} {name}", aim, (reached[key] or {}).get(name))
        for title, key, aims in (
            ("input tokens", "input_tokens", _INPUT_AIMS),
            ("output tokens", "output_tokens", _OUTPUT_AIMS),
            ("block reuse gap, s,", "reuse_gap_s", _GAP_AIMS),
        )
        for name, aim in aims.items()
    ]
    return [
        Figure(name, aim, 0.0 if value is None else value, is_share)
        for rows, is_share in ((shares, True), (sizes, False))
        for name, aim, value in rows
    ]


class ShareGptCounts:
    """Sums over conversations as they are generated."""

    def __init__(self) -> None:
        self._num_conversations = 0
        self._num_multi_turn = 0
        self._tokens = {"human": 0.0, "gpt": 0.0}
        self._num_turns = 0

    def add(self, row: dict[str, Any]) -> None:
        messages = row["conversations"]
        turns = sum(message["from"] == "gpt" for message in messages)
        self._num_conversations += 1
        self._num_multi_turn += turns > 1
        self._num_turns += turns
        for message in messages:
            if message["from"] in self._tokens:
                tokens = len(message["value"].encode()) / BYTES_PER_TOKEN
                self._tokens[message["from"]] += tokens

    def figures(self) -> list[Figure]:
        conversations, turns = max(1, self._num_conversations), max(1, self._num_turns)
        return [
            Figure(
                "conversations of several turns",
                sharegpt_model.MULTI_TURN,
                self._num_multi_turn / conversations,
                True,
            ),
            Figure(
                "turns a conversation",
                sharegpt_model.MEAN_TURNS,
                self._num_turns / conversations,
                False,
            ),
            Figure(
                "tokens a question",
                sharegpt_model.QUESTION_TOKENS,
                self._tokens["human"] / turns,
                False,
            ),
            Figure(
                "tokens an answer",
                sharegpt_model.ANSWER_TOKENS,
                self._tokens["gpt"] / turns,
                False,
            ),
        ]


def of_sharegpt(counts: ShareGptCounts, requests: Sequence[TraceRequest]) -> list[Figure]:
    """``requests`` may be empty; with times, their gaps are figures too."""
    figures = counts.figures()
    last: dict[str | None, float] = {}
    gaps = []
    for request in requests:
        now = request.arrival_s or 0.0
        if request.conversation in last:
            gaps.append(now - last[request.conversation])
        last[request.conversation] = now
    if gaps:
        median = float(np.median(gaps))
        figures.append(Figure("gap between turns p50, s", GAP_MEDIAN_S, median, False))
    return figures
