"""Conversations of random printable tokens, whose next turn holds everything said before."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from serving_bench.client import Request, Sample


def random_tokens(source: random.Random, number: int) -> list[int]:
    """Printable bytes: what the demo models were made for, and no special token among them."""
    return [source.randrange(32, 127) for _ in range(number)]


@dataclass
class Conversation:
    """``turn`` gives a request, ``answered`` appends what was asked and answered for good."""

    label: str
    source: random.Random
    history: list[int] = field(default_factory=list)
    num_turns: int = 0

    def turn(self, num_new: int, num_output: int, variant: str = "") -> Request:
        """History and new tokens. Called twice without an answer between, both requests share the
        history and nothing more."""
        prompt = (*self.history, *random_tokens(self.source, num_new))
        return Request(
            label=f"{self.label}/{self.num_turns}{variant}",
            prompt=prompt,
            num_output=num_output,
            num_reusable=len(self.history),
        )

    def answered(self, request: Request, sample: Sample) -> None:
        """The KV of the last token of an answer is never computed, so it is new next time."""
        self.history = [*request.prompt, *sample.output_ids]
        self.num_turns += 1


def make_conversations(label: str, seed: int, number: int) -> list[Conversation]:
    """Conversations that share no first page, each with a source of its own."""
    return [
        Conversation(f"{label}/{index}", random.Random(f"{seed}/{label}/{index}"))
        for index in range(number)
    ]
