"""What stock answers, by prompt and weights: asked once, remembered, and compared.

Greedy decoding of the demo model gives the same tokens whatever the batch, but for ties: where its
two best tokens are closer than rounding, either is right, and what follows cannot be compared.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from pathlib import Path
from typing import Any

from server_process import Server

__all__ = ["Answers"]

TIE = 2e-3
"""Of log probabilities; rounding of float32 moves them by a hundredth of it."""
STOCK = ("--tier-mode", "off", "--max-total-tokens", "16384", "--sleep-on-idle")


class Answers:
    """One stock server for each set of weights."""

    def __init__(self, models: dict[str, Path], folder: Path) -> None:
        self._servers = {
            name: Server.spawn(path, folder / f"stock-{name}.log", *STOCK)
            for name, path in models.items()
        }
        self._known: dict[tuple[str, bytes, int], list[int]] = {}
        self._lock = threading.Lock()
        self.num_ties = 0

    def wait_until_ready(self) -> None:
        for server in self._servers.values():
            server.wait_until_it_generates()

    def expected(self, weights: str, prompt: list[int], num_new: int) -> list[int]:
        key = (weights, hashlib.sha256(str(prompt).encode()).digest(), num_new)
        with self._lock:
            known = self._known.get(key)
        if known is None:
            known = self._servers[weights].generate(prompt, num_new).output_ids
            with self._lock:
                self._known[key] = known
        return known

    def is_right(self, weights: str, prompt: list[int], num_new: int, got: list[int]) -> bool:
        """Whether tokens are what stock answers, or, of an answer that was cut off, begin so."""
        expected = self.expected(weights, prompt, num_new)
        differing = [i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b]
        if not differing:
            return len(got) <= len(expected)
        first = differing[0]
        if not self._is_tie(weights, [*prompt, *expected[:first]], got[first]):
            return False
        with self._lock:
            self.num_ties += 1
        return True

    def is_mixture(self, prompt: list[int], num_new: int, got: list[int]) -> bool:
        """Whether one set of weights went on with what another began. Nearly always it did where
        the answer leaves the one that was begun, so there the search begins."""
        for first in self._servers:
            expected = self.expected(first, prompt, num_new)
            pairs = zip(got, expected, strict=False)
            common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            for cut in range(min(common, num_new - 1), -1, -1):
                begun, rest = [*prompt, *got[:cut]], got[cut:]
                for second in self._servers:
                    if second != first and self.is_right(second, begun, num_new - cut, rest):
                        return True
        return False

    def _is_tie(self, weights: str, prompt: list[int], token: int) -> bool:
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        answer = self._servers[weights].request("/generate", body)
        (best, first, _), (next_best, second, _) = answer["meta_info"]["output_top_logprobs"][0]
        return token in (first, second) and best - next_best < TIE

    def close(self) -> None:
        for server in self._servers.values():
            server.kill()
