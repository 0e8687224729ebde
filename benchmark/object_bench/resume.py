"""A conversation that one server opened, resumed on another, against computing it there again."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from server_process import Server
from storage_bench.figures import quotients

if TYPE_CHECKING:
    from storage_bench.figures import Report


ROOT = Path(__file__).parents[2]
NUM_TOKENS = 4000
DEADLINE_S = 60.0
NUM_NEW = 8


@dataclass
class Resumed:
    """Seconds to the first token, round by round, both on the second server."""

    resumed_s: list[float] = field(default_factory=list)
    computed_s: list[float] = field(default_factory=list)
    cached_share: list[float] = field(default_factory=list)  # of the resumed prompts' tokens


def measure(
    model: Path, folder: Path, num_rounds: int, *, tier: str, shared: tuple[str, ...]
) -> Resumed:
    """Both servers keep NVMe directories of their own and are given the flags ``shared``; the
    second one finds what the first computed in ``tier`` (``object`` or ``peer``). Raises when the
    resumed conversation does not go on as the uninterrupted one."""
    flags = ("--max-total-tokens", "16384", "--page-size", "64", *shared)
    folder.mkdir(exist_ok=True)
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
            _wait_until_known(second, opened, tier)
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


def make_model(path: Path) -> Path:
    """The demo model, of a size whose prefill takes its time."""
    command = [sys.executable, str(ROOT / "scripts/make_demo_model.py"), str(path)]
    subprocess.run([*command, "--shape", "24m"], check=True, stdout=subprocess.DEVNULL)
    return path


def add(name: str, found: Resumed, report: Report) -> None:
    """As a figure: resumed over computed."""
    report.add(
        name,
        quotients(found.resumed_s, found.computed_s),
        beside=f"resumed {statistics.median(found.resumed_s):.3f} s, "
        f"computed {statistics.median(found.computed_s):.3f} s, "
        f"{statistics.median(found.cached_share):.1%} of {NUM_TOKENS:,} tokens cached",
    )
    report.raw[name] = vars(found)


def _wait_until_known(server: Server, prompt: list[int], tier: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    wanted = len(prompt) - 128
    while (held := server.request("/tier/residency", {"input_ids": prompt}))[tier] < wanted:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the second server does not find the conversation: {held}")
        time.sleep(0.1)
