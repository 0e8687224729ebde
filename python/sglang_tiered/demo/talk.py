"""What the demo asks: words of the project's own glossary, behind that glossary.

Each prompt begins with its number, so no two share a first page. The glossary's rows follow, in an
order of its own, and a question whose answer stands there. All have one length, in tokens.
"""

from __future__ import annotations

import random
import re
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Talk", "glossary"]

# Those that the trained demo model answers out of the text, with the row among the last ones: it is
# small.
ASKED = ("admission", "credit", "extent", "hit, miss", "namespace")


def glossary() -> dict[str, str]:
    """Meanings by word."""
    page = resources.files(__package__ or "").joinpath("glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    return {word: re.sub(r"[`*]", "", meaning) for word, meaning in rows if word != "word"}


class Talk:
    """``tokenize`` gives the tokens of a text, as the server that is asked does."""

    def __init__(self, tokenize: Callable[[str], list[int]]) -> None:
        self._tokenize = tokenize
        self._rows = {word: f"{word}: {meaning}." for word, meaning in glossary().items()}
        self._prompts: dict[tuple[int, int], list[int]] = {}

    def question(self, number: int) -> str:
        return f'What does "{ASKED[number % len(ASKED)]}" mean?'

    def prompt(self, number: int, length: int) -> list[int]:
        """``length`` token ids, the same ones whenever ``number`` is asked."""
        key = number, length
        if key not in self._prompts:
            word = ASKED[number % len(ASKED)]
            tail = self._tokenize(f"\n\nQuestion: {self.question(number)}\nAnswer: {word}:")
            head = self._tokenize(f"{number}. Glossary\n\n")
            order = random.Random(number)
            text: list[int] = []
            room = length - len(head) - len(tail)
            while len(text) < room:
                rows = order.sample([*self._rows.values()], len(self._rows))
                rows.remove(self._rows[word])
                rows.insert(-2, self._rows[word])
                text = self._tokenize("\n".join(rows)) + text
            self._prompts[key] = (head + text[len(text) - max(room, 0) :] + tail)[:length]
        return self._prompts[key]
