"""Prompts as users bring them: conversations that grow, come back and branch; and what each tenant
has asked, which bounds what may be found of its prompts."""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

TENANTS: tuple[dict[str, Any], ...] = (
    {"extra_key": "acme", "cache_salt": "s3cret"},
    {"extra_key": "other"},
)
MAX_TOKENS = 2600
MAX_CONVERSATIONS = 40


@dataclass(frozen=True)
class Prompt:
    """One turn to be asked."""

    tokens: list[int]
    tenant: int
    kind: str


class Conversations:
    """The prompts of a life. Any thread; the source is the caller's."""

    def __init__(self) -> None:
        self._held: list[tuple[int, list[int]]] = []
        self._lock = threading.Lock()

    def draw(self, source: random.Random) -> Prompt:
        with self._lock:
            held = source.choice(self._held) if self._held else None
        kind = source.choices(["new", "grow", "return", "branch", "borrow"], [3, 6, 5, 2, 1], k=1)[
            0
        ]
        if held is None or kind == "new":
            tenant = source.randrange(len(TENANTS))
            return Prompt(words(source, source.choice([3, 64, 65, 300, 700, 1500])), tenant, "new")
        tenant, tokens = held
        if kind == "grow":
            return Prompt([*tokens, *words(source, source.randint(1, 300))], tenant, kind)
        if kind == "branch":
            stem = tokens[: source.randint(1, len(tokens))]
            return Prompt([*stem, *words(source, source.randint(1, 200))], tenant, kind)
        if kind == "borrow":  # the other tenant says the same, and must find nothing of it
            return Prompt(tokens, (tenant + 1) % len(TENANTS), kind)
        return Prompt(tokens, tenant, kind)

    def answered(self, source: random.Random, prompt: Prompt, answer: list[int]) -> None:
        """The conversation goes on behind the answer, at the next turn."""
        tokens = [*prompt.tokens, *answer]
        if len(tokens) > MAX_TOKENS:
            return
        with self._lock:
            if len(self._held) < MAX_CONVERSATIONS:
                self._held.append((prompt.tenant, tokens))
            else:
                self._held[source.randrange(MAX_CONVERSATIONS)] = (prompt.tenant, tokens)

    def of(self, tenant: int) -> list[Prompt]:
        with self._lock:
            return [Prompt(one, tenant, "held") for whose, one in self._held if whose == tenant]

    def any_held(self, source: random.Random) -> Prompt | None:
        with self._lock:
            if not self._held:
                return None
            tenant, tokens = source.choice(self._held)
        return Prompt(tokens, tenant, "held")


def words(source: random.Random, number: int) -> list[int]:
    return [source.randrange(32, 127) for _ in range(number)]


@dataclass
class Asked:
    """Whole pages of what was ever asked, by weights and tenant. Any thread."""

    page: int
    num_erasures: list[int] = field(default_factory=lambda: [0] * len(TENANTS))  # that began
    _known: dict[tuple[str, int], dict[bytes, float]] = field(default_factory=dict)
    _running: dict[int, tuple[int, set[bytes]]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, tenant: int, tokens: list[int]) -> int:
        """A request is on its way, and others may find what it leaves. Its number."""
        chain = set(self._chain(tokens))
        with self._lock:
            number = next(self._numbers)
            self._running[number] = (tenant, chain)
        return number

    def most(self, number: int, weights: set[str], tokens: list[int]) -> int:
        """Leading tokens that the request may have found of others."""
        chain = self._chain(tokens)
        with self._lock:
            tenant, _ = self._running[number]
            running: set[bytes] = set()
            for one, (whose, theirs) in self._running.items():
                if whose == tenant and one != number:
                    running |= theirs
            known = [{*self._known.get((one, tenant), {}), *running} for one in weights]
        return self.page * max(
            sum(1 for _ in itertools.takewhile(held.__contains__, chain)) for held in known
        )

    def end(self, number: int, weights: set[str], tokens: list[int]) -> None:
        """It ended; ``tokens`` with the answer, under any of the weights."""
        chain, now = self._chain(tokens), time.monotonic()
        with self._lock:
            tenant, _ = self._running.pop(number)
            for one in weights:
                self._known.setdefault((one, tenant), {}).update(dict.fromkeys(chain, now))

    def erasure_begins(self, tenant: int) -> float:
        with self._lock:
            self.num_erasures[tenant] += 1
        return time.monotonic()

    def erased(self, tenant: int, began: float, tokens: list[int] | None = None) -> None:
        """Of a tenant, or of one conversation of it, what ended before the erasure began may not
        be found any more."""
        chosen = None if tokens is None else set(self._chain(tokens))
        with self._lock:
            for (_, whose), held in self._known.items():
                if whose == tenant:
                    of = held if chosen is None else chosen & held.keys()
                    for digest in [one for one in of if held[one] < began]:
                        del held[digest]

    def _chain(self, tokens: list[int]) -> list[bytes]:
        """A digest for each whole page, of it and all before it."""
        digest, chain = hashlib.sha256(), []
        for start in range(0, len(tokens) - self.page + 1, self.page):
            digest.update(str(tokens[start : start + self.page]).encode())
            chain.append(digest.digest())
        return chain
