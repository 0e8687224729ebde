"""Text of plain words, as long as it is asked to be."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_tiered.trace.generator.draws import Draws

__all__ = ["text"]

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
