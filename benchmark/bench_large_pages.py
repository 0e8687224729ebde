"""Whether prompts with as much KV per token as a large model's come back from the tiers.

    python benchmark/bench_large_pages.py [--shape kv256] [--host 5GiB 1536MiB 1GiB] [--json FILE]

Every host tier gets a server of its own and an empty NVMe tier. The prompts are asked in turn,
three rounds; device memory holds fewer than are asked. Printed: prompt tokens that came from a
tier, of those that whole pages hold, the seconds a request took, and whether every answer was that
of the first round.
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
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from server_process import Server
from sglang_tiered.tools.machine import describe_machine, describe_versions

ROOT = Path(__file__).parents[1]
PAGE = 64
NUM_NEW = 4


def measure(
    model: Path, host: str, prompts: list[list[int]], *, device_tokens: int, folder: Path
) -> dict[str, Any]:
    """Three rounds on one server; per round the hit rate, the median TTFT and the answers."""
    folder.mkdir()
    server = Server.start(
        model,
        folder / "server.log",
        *("--max-total-tokens", str(device_tokens), "--tier-host-bytes", host),
        *("--tier-dir", str(folder / "kv"), "--tier-nvme-bytes", "16GiB", "--tier-load", "always"),
    )
    wanted = sum((len(prompt) - 1) // PAGE * PAGE for prompt in prompts)
    rounds, first = [], None
    with server:
        for _ in range(3):
            seconds, answers = [], []
            for prompt in prompts:
                began = time.perf_counter()
                answers.append(server.generate(prompt, num_new=NUM_NEW))
                seconds.append(time.perf_counter() - began)
            first = first or [answer.output_ids for answer in answers]
            rounds.append(
                {
                    "hit_rate": sum(answer.num_cached for answer in answers) / wanted,
                    "request_s": {
                        "median": statistics.median(seconds),
                        "min": min(seconds),
                        "max": max(seconds),
                    },
                    "answers_equal": [answer.output_ids for answer in answers] == first,
                }
            )
        state = server.tier_state()
    lost = {
        name.partition(":lost_")[2]: value
        for name, value in state.items()
        if name.startswith("host_left_pages:lost_") and value
    }
    num_pages = state["tier_pages:nvme"]
    return {"host": host, "rounds": rounds, "nvme_pages": num_pages, "lost_pages": lost}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="kv256", help="of scripts/make_demo_model.py")
    parser.add_argument("--host", nargs="+", default=["5GiB", "1536MiB", "1GiB"])
    parser.add_argument("--device-tokens", type=int, default=9216)
    parser.add_argument("--num-prompts", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=4224)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    source = random.Random(3)
    prompts = [
        [source.randrange(32, 127) for _ in range(args.prompt_tokens)]
        for _ in range(args.num_prompts)
    ]
    table = Table("host tier", "round", "from a tier", "request s", "answers")
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        maker = ROOT / "scripts" / "make_demo_model.py"
        subprocess.run(
            [sys.executable, str(maker), str(folder / "model"), "--shape", args.shape], check=True
        )
        for number, host in enumerate(args.host):
            result = measure(
                folder / "model",
                host,
                prompts,
                device_tokens=args.device_tokens,
                folder=folder / str(number),
            )
            results.append(result)
            for at, each in enumerate(result["rounds"], 1):
                s = each["request_s"]
                table.add_row(
                    host,
                    str(at),
                    f"{each['hit_rate']:.1%}",
                    f"{s['median']:.2f} ({s['min']:.2f}-{s['max']:.2f})",
                    "equal" if each["answers_equal"] else "DIFFER",
                )
            print(f"{host}: {result['nvme_pages']:.0f} pages on NVMe, lost {result['lost_pages']}")
    Console().print(table)
    if args.json:
        settings = {
            name: value for name, value in vars(args).items() if name not in ("json", "host")
        }
        document = {
            "machine": describe_machine(),
            "settings": {**settings, "versions": describe_versions()},
            "rows": results,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
