"""Prompts that return: stock SGLang beside sglang-tiered, on the same machine and model.

Two servers run side by side, each idle while the other is asked. The same prompts go to both, one
at a time and the systems in turn, so that whatever else the machine does falls on both. Last, the
tiered server is killed (``kill -9`` of its process group) and started again on its directory.
Each request asks for one token, so its duration is the time to the first token. No ratio is printed
unless every answer of every round is the same on both systems.

    python benchmark/bench_rounds.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from machine import describe_machine, describe_versions
from server_process import Answer, Server

ROOT = Path(__file__).parents[1]
PAGE_SIZE = 64
PROMPT_LENGTH = 1500
DEVICE_TOKENS = 8192
HOST_BYTES = "64MiB"
NUM_RETURNS = 5
NUM_WARM_UP = 16  # other prompts first: enough to touch every page of the host tier once


@dataclass
class Round:
    """One pass over the prompts on one system."""

    seconds: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def ask(self, server: Server, prompt: list[int]) -> None:
        start = time.perf_counter()
        self.answers.append(server.generate(prompt, num_new=1))
        self.seconds.append(time.perf_counter() - start)

    @property
    def ttft_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that whole pages can hold."""
        usable = len(self.answers) * ((PROMPT_LENGTH - 1) // PAGE_SIZE * PAGE_SIZE)
        return sum(answer.num_cached for answer in self.answers) / usable

    def tokens(self, tier: str) -> int:
        return sum(answer.cached[tier] for answer in self.answers)


def run_round(systems: dict[str, Server], prompts: list[list[int]], title: str) -> dict[str, Round]:
    """Every prompt on every system, the first system changing from prompt to prompt."""
    rounds = {name: Round() for name in systems}
    for number, prompt in enumerate(tqdm(prompts, desc=title, leave=False)):
        names = list(systems)
        for name in names if number % 2 else reversed(names):
            rounds[name].ask(systems[name], prompt)
    return rounds


def same_answers(rounds: list[dict[str, Round]]) -> bool:
    answers = [
        [answer.output_ids for answer in one.answers] for pair in rounds for one in pair.values()
    ]
    return all(other == answers[0] for other in answers)


def ratio(rounds: list[dict[str, Round]]) -> dict[str, float]:
    """How much sooner the first token comes than in stock SGLang: per round, then the median."""
    values = [pair["stock"].ttft_s / pair["tiered"].ttft_s for pair in rounds]
    return {
        "value": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def measure(num_prompts: int, folder: Path) -> tuple[list[dict[str, Round]], list[str]]:
    """The first round, the returning ones and the one after the restart, with their titles."""
    model = folder / "model"
    maker = ROOT / "scripts" / "make_demo_model.py"
    subprocess.run([sys.executable, str(maker), str(model)], check=True)
    source = random.Random(0)
    prompts = [
        [source.randrange(32, 127) for _ in range(PROMPT_LENGTH)]
        for _ in range(num_prompts + NUM_WARM_UP)
    ]
    warm_up, prompts = prompts[:NUM_WARM_UP], prompts[NUM_WARM_UP:]
    device = ("--max-total-tokens", str(DEVICE_TOKENS), "--page-size", str(PAGE_SIZE))
    tiers = (*device, "--tier-host-bytes", HOST_BYTES, "--tier-dir", str(folder / "kv"))
    systems: dict[str, Server] = {}
    try:
        systems["stock"] = Server.start(model, folder / "stock.log", "--tier-mode", "off", *device)
        systems["tiered"] = Server.start(model, folder / "tiered.log", *tiers)
        run_round(systems, warm_up, "warm-up")
        titles = ["first", *(f"return {number + 1}" for number in range(NUM_RETURNS))]
        rounds = [run_round(systems, prompts, title) for title in titles]
        pages = (num_prompts + NUM_WARM_UP) * (PROMPT_LENGTH // PAGE_SIZE)
        systems["tiered"].wait_for_state("tier_pages:nvme", pages)
        systems["tiered"].kill()
        systems["tiered"] = Server.start(model, folder / "tiered.log", *tiers)
        rounds.append(run_round(systems, prompts, "after kill -9"))
        return rounds, [*titles, "after kill -9"]
    finally:
        for server in systems.values():
            server.kill()


def report(rounds: list[dict[str, Round]], titles: list[str]) -> None:
    table = Table("round", "stock TTFT", "tiered TTFT", "hit rate", "device", "host", "storage")
    for title, pair in zip(titles, rounds, strict=True):
        tiered = pair["tiered"]
        table.add_row(
            title,
            f"{pair['stock'].ttft_s * 1e3:.0f} ms",
            f"{tiered.ttft_s * 1e3:.0f} ms",
            f"{tiered.hit_rate:.1%}",
            *(str(tiered.tokens(tier)) for tier in ("device", "host", "storage")),
        )
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a third of the prompts")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    num_prompts = 16 if options.quick else 48
    with tempfile.TemporaryDirectory(prefix="bench-rounds-") as folder:
        rounds, titles = measure(num_prompts, Path(folder))
    if not same_answers(rounds):
        print("The systems or rounds gave different answers, so there is nothing to compare.")
        return 1
    report(rounds, titles)
    ratios = {
        "returning_ttft_over_stock": ratio(rounds[1:-1]),
        "restart_ttft_over_stock": ratio(rounds[-1:]),
        "first_ttft_over_stock": ratio(rounds[:1]),
    }
    for name, figures in ratios.items():
        low, high = figures["min"], figures["max"]
        print(f"{name}: {figures['value']:.2f} (min {low:.2f}, max {high:.2f}, n {figures['n']})")
    if options.json:
        options.json.write_text(json.dumps(document(rounds, titles, ratios, num_prompts), indent=1))
    return 0


def document(
    rounds: list[dict[str, Round]],
    titles: list[str],
    ratios: dict[str, dict[str, float]],
    num_prompts: int,
) -> dict[str, Any]:
    return {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {
            "num_prompts": num_prompts,
            "num_warm_up": NUM_WARM_UP,
            "prompt_length": PROMPT_LENGTH,
            "output_length": 1,
            "device_tokens": DEVICE_TOKENS,
            "host_bytes": HOST_BYTES,
            "page_cache": "the store reads with O_DIRECT where the filesystem allows it",
        },
        "ratios": ratios,
        "raw": [
            {
                "round": title,
                **{
                    name: {
                        "seconds": one.seconds,
                        "hit_rate": one.hit_rate,
                        **{tier: one.tokens(tier) for tier in ("device", "host", "storage")},
                    }
                    for name, one in pair.items()
                },
            }
            for title, pair in zip(titles, rounds, strict=True)
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
