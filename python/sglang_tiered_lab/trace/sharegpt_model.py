"""Conversations like those of ShareGPT, with text, some behind a shared system prompt.

Where the numbers are from:

* 73% of conversations have more than one turn: Gao et al., CachedAttention (USENIX ATC 2024), by
  its abstract;
* 3.51 turns, 94.5 tokens a question and 348.5 an answer in the mean: the ShareGPT row of the table
  in Zhao et al., WildChat (ICLR 2024), quoted from memory by this project's survey, not checked;
* gaps between turns: ``trace.arrivals``;
* how lengths scatter (lognormal, sigma 1.2 for questions and 0.8 for answers), how many system
  prompts there are, how long they are and who has one: ours, nothing published is behind them.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import random
import statistics
from typing import TYPE_CHECKING

import msgspec

from sglang_tiered_lab.trace.text import BYTES_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


MULTI_TURN = 0.73
MEAN_TURNS = 3.51
QUESTION_TOKENS = 94.5
ANSWER_TOKENS = 348.5

_NORMAL = statistics.NormalDist()
_QUESTION_SIGMA = 1.2
_ANSWER_SIGMA = 0.8
_MAX_TURN_TOKENS = 8192
_MAX_TURNS = 200
_SYSTEM_SEED = -1  # of the draws that system prompts come from; conversations count from 0


class Draws:
    """Random numbers that are the same from the same seed on every machine: built on
    ``random.Random.random`` alone, whose numbers Python promises not to change."""

    def __init__(self, *seed: int) -> None:
        self._random = random.Random(":".join(map(str, seed)))

    def share(self) -> float:
        """From 0 to 1, without 0."""
        return 1.0 - self._random.random()

    def below(self, number: int) -> int:
        return min(int(self._random.random() * number), number - 1)

    def happens(self, chance: float) -> bool:
        return self._random.random() < chance

    def lognormal(self, median: float, sigma: float) -> float:
        share = min(max(self._random.random(), 1e-12), 1 - 1e-12)
        return median * math.exp(sigma * _NORMAL.inv_cdf(share))

    def index(self, cumulative: Sequence[float]) -> int:
        """An index with a chance in proportion to its step of ``cumulative``."""
        return bisect.bisect_left(cumulative, self.share() * cumulative[-1])


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What is ours to choose. A share of ``system_share`` of the conversations begins with one of
    ``num_system_prompts`` prompts of ``system_tokens`` tokens, the n-th 1/n times as often as the
    first."""

    num_conversations: int = 1000
    seed: int = 0
    num_system_prompts: int = 8
    system_tokens: int = 512
    system_share: float = 0.5


def rows(shape: Shape) -> Iterator[bytes]:
    """Each conversation as JSON, from the same seed the same bytes."""
    system_draws = Draws(shape.seed, _SYSTEM_SEED)
    prompts = [
        text(system_draws, shape.system_tokens * BYTES_PER_TOKEN)
        for _ in range(shape.num_system_prompts)
    ]
    ranks = list(itertools.accumulate(1 / rank for rank in range(1, len(prompts) + 1)))
    for number in range(shape.num_conversations):
        draws = Draws(shape.seed, number)
        turns = []
        if prompts and draws.happens(shape.system_share):
            turns.append({"from": "system", "value": prompts[draws.index(ranks)]})
        for _ in range(_num_turns(draws)):
            for speaker, mean, sigma in (
                ("human", QUESTION_TOKENS, _QUESTION_SIGMA),
                ("gpt", ANSWER_TOKENS, _ANSWER_SIGMA),
            ):
                turns.append({"from": speaker, "value": text(draws, _bytes(draws, mean, sigma))})
        row = {"id": f"generated_{shape.seed}_{number}", "conversations": turns}
        yield json.dumps(row).encode()


def _num_turns(draws: Draws) -> int:
    """One with the published chance; otherwise two and a geometric number more, which brings the
    mean to the published one."""
    if not draws.happens(MULTI_TURN):
        return 1
    more = (MEAN_TURNS - (1 - MULTI_TURN)) / MULTI_TURN - 2
    chance = more / (1 + more)
    return min(_MAX_TURNS, 2 + int(math.log(draws.share()) / math.log(chance)))


def _bytes(draws: Draws, mean_tokens: float, sigma: float) -> int:
    median = mean_tokens / math.exp(sigma * sigma / 2)
    tokens = min(draws.lognormal(median, sigma), _MAX_TURN_TOKENS)
    return max(1, round(tokens * BYTES_PER_TOKEN))


_BEGINNINGS = ("b", "br", "c", "d", "f", "g", "gr", "k", "l", "m", "n", "p", "r", "s", "st", "t")
_MIDDLES = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
_ENDS = ("", "l", "n", "r", "s", "t", "nd", "st")
_WORDS = tuple("".join(parts) for parts in itertools.product(_BEGINNINGS, _MIDDLES, _ENDS))
_SENTENCE_WORDS = 12


def text(draws: Draws, num_bytes: int) -> str:
    """Sentences of words of one syllable, ``num_bytes`` of ASCII in all."""
    words: list[str] = []
    length = 0
    while length <= num_bytes:  # the space after the last word is not written
        word = _WORDS[draws.below(len(_WORDS))]
        if len(words) % _SENTENCE_WORDS == 0:
            word = word.capitalize()
        elif len(words) % _SENTENCE_WORDS == _SENTENCE_WORDS - 1:
            word += "."
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:num_bytes]
