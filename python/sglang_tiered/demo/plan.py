"""Which prompts are asked, the words of them, and where each lies when it is asked again.

Every prompt goes to the device and, at the same time, to host memory and NVMe; the least recently
used leave device and host memory. So the newest are on the device, those before them in host memory
only, and the first on NVMe only, once enough were asked. A prompt at the edge of a tier may lie on
either side, so none of those is asked again.

Asked are words of the project's own glossary, behind that glossary. Each prompt begins with its
number, so no two share a first page. The rows follow, in an order of its own, and a question whose
answer stands there. All have one length, in tokens.
"""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from sglang_tiered.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "DEVICE",
    "FIRST",
    "HOST",
    "KILLED",
    "NUM_NEW",
    "NVME",
    "DemoPlan",
    "Pools",
    "Talk",
    "glossary",
    "make_plan",
]

FIRST, DEVICE, HOST, NVME = "first time", "device", "host", "NVMe"
KILLED = "NVMe after kill -9"

NUM_NEW = 12
"""Tokens of an answer: enough to say something, few enough to be quick."""

_MOST_PROMPT_TOKENS = 1536
"""Long enough for a load to be worth it with a model as small as the demo's."""
_LEAST_ON_DEVICE = 5
_PROMPTS_PER_ROW = 3
# Those that the trained demo model answers out of the text, with the row among the last ones: it is
# small.
ASKED = ("admission", "credit", "extent", "hit, miss", "namespace")


@dataclass(frozen=True)
class Pools:
    """What a server's tiers hold, in tokens."""

    device_tokens: int
    host_tokens: int
    page_size: int
    has_nvme: bool


@dataclass(frozen=True)
class DemoPlan:
    """``num_prompts`` are asked in order; then ``returns``, row by row, by their numbers."""

    prompt_tokens: int
    num_prompts: int
    returns: dict[str, tuple[int, ...]]
    missing: dict[str, str]  # rows that cannot be reached, and why


def make_plan(pools: Pools, max_tokens: int | None = None) -> DemoPlan:
    """``max_tokens`` bounds the prompts that are asked for the first time."""
    page = pools.page_size
    pages = min(_MOST_PROMPT_TOKENS, pools.device_tokens // _LEAST_ON_DEVICE) // page
    length = max(pages, 1) * page + 1  # the last token of a prompt is always computed
    held = (length + NUM_NEW) // page * page  # what stays of a prompt and its answer
    fit_device = pools.device_tokens // held
    if fit_device < 2:
        raise ConfigError(
            f"the device holds {pools.device_tokens:,} tokens, fewer than two prompts of {held:,}; "
            "the demo needs a larger --max-total-tokens"
        )
    most = sys.maxsize if max_tokens is None else max_tokens // length
    if most < 1:
        raise ConfigError(
            f"--max-tokens {max_tokens} is less than one prompt; pass {length} at least"
        )
    # By age: how many were asked after it.
    off_device = -(-pools.device_tokens // held)
    off_host = max(off_device, -(-pools.host_tokens // held)) + 1
    ages = {
        DEVICE: range(min(_PROMPTS_PER_ROW, fit_device - 1)),
        HOST: range(off_device, min(off_device + _PROMPTS_PER_ROW, pools.host_tokens // held)),
        NVME: range(off_host, off_host + (_PROMPTS_PER_ROW if pools.has_nvme else 0)),
    }
    nothing = {
        HOST: "host memory holds no more than the device",
        NVME: "this server has no NVMe tier",
    }
    reached: dict[str, list[int]] = {}
    missing: dict[str, str] = {}
    for row, wanted in ages.items():
        if not wanted:
            missing[row] = nothing[row]
        elif wanted[0] >= most:
            missing[row] = f"would take {(wanted[0] + 1) * length:,} tokens"
        else:
            reached[row] = [age for age in wanted if age < most]
    oldest = max(age for row in reached.values() for age in row)
    returns = {row: tuple(oldest - age for age in reached[row]) for row in reached}
    return DemoPlan(length, oldest + 1, returns, missing)


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
