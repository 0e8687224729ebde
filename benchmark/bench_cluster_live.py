"""Three real servers on one machine, and the fronts that people run before them in turn
(``docs/routing.md``).

    python benchmark/bench_cluster_live.py [--rounds N] [--users N] [--json FILE]

Users in closed loop have conversations that grow, in text, by OpenAI's completions. All of them
together need more than the memory of one server, and fit that of the three once. Arms are
``cost``, Envoy with our picker, and ``cache-aware``, sglang-router 0.3.2 as ``bench_routing``
found best. Each round draws conversations of its own, and the servers are emptied before each arm.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from rich.console import Console

from bench_routing_front import front
from front_bench.result import spread, write_result
from server_process import Server, free_ports
from serving_bench.setting import Geometry
from serving_bench.systems import ENVIRONMENT, launch_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
ARMS = ("cost", "cache-aware")
NUM_SERVERS, SHAPE = 3, "24m"
GEOMETRY = Geometry(device_tokens=3072, host_ratio=1, nvme_bytes=1 << 30)
NUM_TURNS, FIRST_LETTERS, TURN_LETTERS, NUM_OUTPUT = 4, 600, 200, 8
"""The demo model's tokens are letters."""
ANSWER_S = 300.0

console = Console()


@contextlib.contextmanager
def started(model: Path, folder: Path) -> Iterator[list[Server]]:
    """Servers that tell events, as ``scripts/serve-cluster`` starts them."""
    servers = []
    try:
        for number in range(NUM_SERVERS):
            place = folder / str(number)
            place.mkdir()
            port = free_ports(2)
            events = {
                "publisher": "zmq",
                "endpoint": f"tcp://127.0.0.1:{port}",
                "replay_endpoint": f"tcp://127.0.0.1:{port + 1}",
                "bind": True,
                "format": "dynamo",
            }
            flags = launch_arguments("tiered", GEOMETRY, place, ["--enable-cache-report"])
            flags += ["--kv-events-config", json.dumps(events)]
            servers.append(Server.spawn(model, place / "log", *flags, environment=ENVIRONMENT))
        for server in servers:
            server.wait_until_it_generates()
        yield servers
    except BaseException:
        for server in servers:
            console.print(server.log[-2000:], markup=False)
        raise
    finally:
        for server in servers:
            server.stop()


async def run_arm(
    arm: str, servers: list[Server], num_users: int, seed: int, folder: Path
) -> dict[str, Any]:
    """Let all conversations happen. Returns what the users saw."""
    for server in servers:
        await asyncio.to_thread(server.flush)
        await asyncio.to_thread(server.request, "/tier/purge", {"all": True})
    draw = random.Random(seed)
    ttft_s: list[float] = []
    cached = prompt_tokens = 0

    def letters(number: int) -> str:
        return "".join(draw.choices(string.ascii_letters + " ", k=number))

    async def user(session: aiohttp.ClientSession, url: str, turns: list[str]) -> None:
        nonlocal cached, prompt_tokens
        prompt = ""
        for turn in turns:
            prompt += turn
            body = {"model": "m", "prompt": prompt, "stream": True, "temperature": 0}
            body |= {"max_tokens": NUM_OUTPUT, "ignore_eos": True}
            body |= {"stream_options": {"include_usage": True}}
            began_s = time.perf_counter()
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                whole = await answer.content.readany()
                ttft_s.append(time.perf_counter() - began_s)
                whole += await answer.read()
            rows = [row[6:] for row in whole.decode().split("\n") if row.startswith("data: {")]
            usage = next(found for row in rows if (found := json.loads(row).get("usage")))
            prompt_tokens += usage["prompt_tokens"]
            cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    plans = [
        [letters(FIRST_LETTERS), *(letters(TURN_LETTERS) for _ in range(NUM_TURNS - 1))]
        for _ in range(num_users)
    ]
    ports = [server.port for server in servers]
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with front(arm, ports, folder, "") as port, aiohttp.ClientSession(timeout=timeout) as s:
        began_s = time.perf_counter()
        url = f"http://127.0.0.1:{port}"
        await asyncio.gather(*(user(s, url, turns) for turns in plans))
        took_s = time.perf_counter() - began_s
    ttft_s.sort()
    return {
        "arm": arm,
        "seed": seed,
        "requests": len(ttft_s),
        "took_s": took_s,
        "mean_ttft_s": statistics.fmean(ttft_s),
        "p99_ttft_s": ttft_s[int(len(ttft_s) * 0.99)],
        "hit_rate": cached / prompt_tokens,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--users", type=int, default=12, help="at once; default 12")
    parser.add_argument("--json", metavar="FILE", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-cluster-") as text:
        folder = Path(text)
        maker = [sys.executable, str(ROOT / "scripts" / "make_demo_model.py")]
        subprocess.run([*maker, str(folder / "model"), "--shape", SHAPE], check=True)
        with started(folder / "model", folder) as servers:
            for turn in range(options.rounds):
                for arm in ARMS if turn % 2 == 0 else reversed(ARMS):
                    place = folder / f"{arm}-{turn}"
                    place.mkdir()
                    row = asyncio.run(run_arm(arm, servers, options.users, turn, place))
                    rows.append(row)
                    console.print(
                        f"round {turn + 1} {arm:12} TTFT {row['mean_ttft_s']:.3f} s p99 "
                        f"{row['p99_ttft_s']:.2f} s all {row['took_s']:.1f} s hit "
                        f"{row['hit_rate']:.3f}"
                    )
    ratios = {}
    for figure in ("mean_ttft_s", "p99_ttft_s", "took_s"):
        by_arm = {arm: [row[figure] for row in rows if row["arm"] == arm] for arm in ARMS}
        values = [ours / other for ours, other in zip(*by_arm.values(), strict=True)]
        one = ratios[f"cost_over_cache-aware_{figure.removesuffix('_s')}"] = spread(values)
        console.print(f"{figure} {one['value']:.2f} ({one['min']:.2f} to {one['max']:.2f})")
    settings = {
        "servers": NUM_SERVERS,
        "shape": SHAPE,
        "device_tokens": GEOMETRY.device_tokens,
        "host_tokens": GEOMETRY.host_tokens,
        "users": options.users,
        "turns": NUM_TURNS,
        "letters": [FIRST_LETTERS, TURN_LETTERS],
    }
    write_result(options.json, settings, ratios, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
