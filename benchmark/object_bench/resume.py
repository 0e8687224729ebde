"""A conversation that one server opened, resumed on another, against computing it there again."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from server_process import Server

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Resumed", "measure"]

NUM_TOKENS = 4000
DEADLINE_S = 60.0
NUM_NEW = 8


@dataclass
class Resumed:
    """Seconds to the first token, round by round, both on the second server."""

    resumed_s: list[float] = field(default_factory=list)
    computed_s: list[float] = field(default_factory=list)
    cached_share: list[float] = field(default_factory=list)  # of the resumed prompts' tokens


def measure(model: Path, folder: Path, num_rounds: int) -> Resumed:
    """Both servers keep NVMe directories of their own and share a directory of objects. Raises when
    the resumed conversation does not go on as the uninterrupted one."""
    flags = ("--max-total-tokens", "16384", "--page-size", "64")
    flags += ("--tier-object-url", str(folder / "objects"))
    servers = [
        Server.spawn(
            model, folder / f"{name}.log", *flags, "--tier-dir", str(folder / f"nvme-{name}")
        )
        for name in "ab"
    ]
    found = Resumed()
    source = random.Random(11)
    try:
        for server in servers:
            server.wait_until_it_generates()
        first, second = servers
        for number in range(num_rounds + 2):  # the first two warm up and teach the cost model
            opened = [source.randrange(32, 127) for _ in range(NUM_TOKENS)]
            unknown = [source.randrange(32, 127) for _ in range(NUM_TOKENS)]
            expected = first.generate(opened, NUM_NEW).output_ids
            first.request("/tier/checkpoint", {"input_ids": opened})
            _wait_until_known(second, opened)
            turns = [(opened, found.resumed_s), (unknown, found.computed_s)]
            for prompt, samples in turns if number % 2 else reversed(turns):
                begun = time.perf_counter()
                answer = second.generate(prompt, 1)
                seconds = time.perf_counter() - begun
                if number < 2:
                    continue
                samples.append(seconds)
                if prompt is opened:
                    found.cached_share.append(answer.num_cached / NUM_TOKENS)
            if second.generate(opened, NUM_NEW).output_ids != expected:
                raise RuntimeError("the resumed conversation went on otherwise")
    finally:
        for server in servers:
            server.kill()
    return found


def _wait_until_known(server: Server, prompt: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    wanted = len(prompt) - 128
    while (held := server.request("/tier/residency", {"input_ids": prompt}))["object"] < wanted:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the second server does not find the conversation: {held}")
        time.sleep(0.1)
