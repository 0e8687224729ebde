"""Two models on one machine that are busy in turn: NVMe that they share, beside two fixed halves.

Each model has conversations of 1.6 halves, drawn at random. One is asked at a time, five
turns in all. Both ways get the same draws; device and host memory are emptied before each
round, so what is found is on NVMe. Of each turn the last round counts. No ratio is printed unless
every answer is the same both ways.

    python benchmark/bench_machine_budget.py [--quick] [--directory /dev/shm] [--json FILE]

On a tmpfs, what they share is host memory.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from server_process import Server
from sglang_tiered.demo.model import SHAPES, write_model
from sglang_tiered.storage.filesystem import filesystem_type
from sglang_tiered.tools.machine import describe_machine, describe_versions

MIB = 1 << 20
PAGE_SIZE = 64
DEVICE_TOKENS = 2048
HOST_BYTES = "24MiB"
PROMPT_LENGTH = 640
HALVES = 1.6
WAYS = ("shared", "halves")


def draws(num_prompts: int, num_rounds: int, turn: int) -> list[list[int]]:
    """The order of the conversations in each round of a turn."""
    source = random.Random(turn)
    return [source.sample(range(num_prompts), num_prompts) for _ in range(num_rounds)]


def flags(way: str, folder: Path, name: str, total_bytes: int) -> list[str]:
    tier = folder / way / name
    common = [
        *("--max-total-tokens", str(DEVICE_TOKENS), "--page-size", str(PAGE_SIZE)),
        *("--tier-host-bytes", HOST_BYTES, "--tier-load", "always", "--tier-dir", str(tier)),
        *("--config", str(folder / "small_regions.yaml")),
    ]
    if way == "halves":
        return [*common, "--tier-nvme-bytes", str(total_bytes // 2)]
    budget = str(folder / way / "budget")
    return [*common, "--tier-nvme-bytes", str(total_bytes), "--tier-machine-budget", budget]


def measure(
    way: str, folder: Path, total_bytes: int, num_rounds: int, num_turns: int
) -> dict[str, Any]:
    """Hit rate and capacities of each turn, all answers, and how many conversations there are."""
    (folder / way).mkdir()
    servers: list[Server] = []
    try:
        for name in ("a", "b"):
            log = folder / way / f"{name}.log"
            model = folder / f"model-{name}"
            servers.append(Server.start(model, log, *flags(way, folder, name, total_bytes)))
        state = servers[0].tier_state()
        token_bytes = state["tier_capacity_bytes:host"] / state["tier_capacity_tokens:host"]
        usable = (PROMPT_LENGTH - 1) // PAGE_SIZE * PAGE_SIZE
        num_prompts = int(HALVES * total_bytes / 2 / (token_bytes * usable))
        source = random.Random(0)
        prompts = [
            [[source.randrange(32, 127) for _ in range(PROMPT_LENGTH)] for _ in range(num_prompts)]
            for _ in servers
        ]
        turns, answers = [], []
        for turn in range(num_turns):
            busy = turn % 2
            rates = []
            for order in tqdm(draws(num_prompts, num_rounds, turn), desc=f"{way}, turn {turn + 1}"):
                servers[busy].flush()
                got = [servers[busy].generate(prompts[busy][i], num_new=1) for i in order]
                answers += [answer.output_ids for answer in got]
                rates.append(sum(one.cached["storage"] for one in got) / (num_prompts * usable))
            capacities = [one.tier_state()["tier_capacity_bytes:nvme"] for one in servers]
            turns.append({"busy": "ab"[busy], "hit_rates": rates, "capacity_bytes": capacities})
        return {"way": way, "num_prompts": num_prompts, "turns": turns, "answers": answers}
    finally:
        for server in servers:
            server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the size")
    parser.add_argument("--directory", type=Path, help="where the stores lie for that time")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    total_bytes, num_rounds, num_turns = (96 * MIB, 6, 5) if options.quick else (512 * MIB, 6, 5)
    with tempfile.TemporaryDirectory(prefix="bench-budget-", dir=options.directory) as name:
        folder = Path(name)
        filesystem = filesystem_type(folder)
        (folder / "small_regions.yaml").write_text("tier-nvme-region-bytes: 4MiB\n")
        for seed, model in enumerate("ab"):
            write_model(folder / f"model-{model}", seed, SHAPES["8m"])
        measured = [measure(way, folder, total_bytes, num_rounds, num_turns) for way in WAYS]
    shared, halves = measured
    if shared.pop("answers") != halves.pop("answers"):
        print("The two ways gave different answers, so there is nothing to compare.")
        return 1
    table = Table("turn", "busy", *(f"hit rate, {way}" for way in WAYS), "capacities, shared")
    ratios = []
    for number, (one, other) in enumerate(zip(shared["turns"], halves["turns"], strict=True)):
        rates = one["hit_rates"][-1], other["hit_rates"][-1]
        ratios.append(rates[0] / rates[1])
        sizes = " / ".join(f"{size / MIB:.0f} MiB" for size in one["capacity_bytes"])
        table.add_row(str(number + 1), one["busy"], *(f"{rate:.1%}" for rate in rates), sizes)
    Console().print(table)
    ratio = {
        "value": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "n": len(ratios),
    }
    print(
        "busy_hit_rate_over_halves: {value:.2f} (min {min:.2f}, max {max:.2f}, n {n})".format(
            **ratio
        )
    )
    if options.json:
        document = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "settings": {
                "filesystem": filesystem,
                "total_bytes": total_bytes,
                "working_set_over_half": HALVES,
                "num_prompts": shared["num_prompts"],
                "prompt_length": PROMPT_LENGTH,
                "output_length": 1,
                "num_rounds": num_rounds,
                "host_bytes": HOST_BYTES,
                "device_tokens": DEVICE_TOKENS,
            },
            "ratios": {"busy_hit_rate_over_halves": ratio},
            "raw": measured,
        }
        options.json.write_text(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
