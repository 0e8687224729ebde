"""Users whose conversations return, for a time."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from serving_bench.client import ask
from serving_bench.conversations import Conversation, make_conversations


@dataclass(frozen=True)
class Traffic:
    """``num_users`` at a time take up one of ``num_conversations``, say ``new_tokens``, are
    answered, and think. Every conversation begins with ``first_tokens`` and, once it has
    ``max_tokens``, is left for a new one."""

    num_users: int = 3
    num_conversations: int = 16
    first_tokens: int = 640
    new_tokens: int = 96
    output_tokens: int = 8
    max_tokens: int = 1408
    think_s: float = 0.3
    seed: int = 27


@dataclass
class _Room:
    traffic: Traffic
    url: str
    until_s: float
    source: random.Random = field(init=False)
    idle: list[Conversation] = field(init=False)
    num_new: int = 0
    tokens: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.source = random.Random(self.traffic.seed)
        self.idle = make_conversations("talk", self.traffic.seed, self.traffic.num_conversations)
        self.num_new = self.traffic.num_conversations

    async def use(self) -> None:
        """One user, until the time is over."""
        traffic = self.traffic
        while time.monotonic() < self.until_s:
            talk = self.idle.pop(self.source.randrange(len(self.idle)))
            num_new = traffic.new_tokens if talk.history else traffic.first_tokens
            request = talk.turn(num_new, traffic.output_tokens)
            sample = await ask(self.url, request)
            talk.answered(request, sample)
            self.tokens.update(sample.cached)
            self.tokens["prompt"] += sample.num_prompt
            self.tokens["requests"] += 1
            if len(talk.history) >= traffic.max_tokens:
                label = f"talk/{self.num_new}"
                talk = Conversation(label, random.Random(f"{traffic.seed}/{label}"))
                self.num_new += 1
            self.idle.append(talk)
            await asyncio.sleep(traffic.think_s)


def converse(traffic: Traffic, url: str, seconds: float) -> dict[str, int]:
    """Returns how many requests were answered, and their prompt tokens by where they came from.
    Raises ``RequestFailedError``."""
    room = _Room(traffic, url, time.monotonic() + seconds)

    async def everybody() -> None:
        await asyncio.gather(*(room.use() for _ in range(traffic.num_users)))

    asyncio.run(everybody())
    return dict(room.tokens)
