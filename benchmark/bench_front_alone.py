"""What the front itself costs, before servers that have nothing to do (``docs/routing.md``).

    python benchmark/bench_front_alone.py [--rounds N] [--tokenizer DIR] [--json FILE]

first token
    One request at a time with a prompt of 32 kB, straight to a server and through Envoy and the
    picker in turn: as token ids, and with ``--tokenizer`` as text.
streams
    32 streams at once of a token each 10 ms: tokens per second through the front over straight.
many
    One picker for 64 servers that tell costs, at 100 requests per second, prompts as before:
    processor seconds per second of the picker and of Envoy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import psutil
from rich.console import Console

from bench_routing import Scale, make_plan
from front_bench.result import spread, write_result
from server_process import free_ports
from sglang_tiered.policy.server_costs import ServerCosts
from sglang_tiered_lab.trace.cluster.records import Reporter
from sglang_tiered_lab.trace.cluster.simulation import Simulation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

IDLE = Path(__file__).parent / "front_bench" / "idle.py"
PROMPT_BYTES = 32 << 10
NUM_REQUESTS, NUM_STREAMS, NUM_TOKENS = 100, 32, 200
MANY_SERVERS, RATE, MANY_S = 64, 100, 15.0
START_S, ANSWER_S = 60.0, 60.0

console = Console()


def record() -> bytes:
    """What an idle server tells of its costs."""
    plan = make_plan(scale=Scale(16, 1))
    server = Simulation(plan, []).servers[0]
    told = Reporter(server, server.costs).take(0.0)
    told = msgspec.structs.replace(told, boot="0" * 32, namespace="aa", server="0" * 32)
    return msgspec.json.encode(ServerCosts(draining=False, num_ranks=1, ranks=(told,)))


@contextlib.asynccontextmanager
async def servers(folder: Path, number: int) -> AsyncIterator[list[int]]:
    """Idle servers. Yields their ports."""
    ports = [free_ports(1) for _ in range(number)]
    (folder / "record").write_bytes(record())
    command = [sys.executable, str(IDLE), str(folder / "record"), *map(str, ports)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), START_S)
        yield ports
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def front(
    folder: Path, ports: Sequence[int], tokenizer: Path | None
) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Envoy and the picker before servers. Yields the address, and the process that started
    both."""
    port = free_ports(3)
    (folder / "servers").write_text("\n".join(f"http://127.0.0.1:{one}" for one in ports))
    command = [sys.executable, "-m", "sglang_tiered", "route", "serve", "--port", str(port)]
    command += ["--servers", str(folder / "servers")]
    command += ["--tokenizer", str(tokenizer)] if tokenizer else []
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
            while True:
                assert process.poll() is None, (folder / "log").read_text()[-2000:]
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"http://127.0.0.1:{port + 2}/servers") as answer:
                        rows = (await answer.json())["servers"]
                    if sum(row["ready"] and bool(row["replicas"]) for row in rows) == len(ports):
                        async with session.get(f"http://127.0.0.1:{port}/health") as answer:
                            if answer.status == 200:
                                break
                await asyncio.sleep(0.1)
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, START_S)


def body(kind: str, number: int, num_tokens: int = 1) -> bytes:
    """A prompt of 32 kB, another each time."""
    if kind == "text":
        prompt: Any = (f"{number:08d} says that " * (PROMPT_BYTES // 19 + 1))[:PROMPT_BYTES]
    else:
        prompt = [number % 50_000, *range(10_000, 10_000 + PROMPT_BYTES // 7)]
    told = {"model": "m", "prompt": prompt, "stream": True, "max_tokens": num_tokens}
    return json.dumps(told).encode()


async def ask(session: aiohttp.ClientSession, url: str, data: bytes) -> tuple[float, int]:
    """Return the seconds to the first chunk, and the bytes of all."""
    began_s = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{url}/v1/completions", data=data, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        first = await answer.content.readany()
        seen_s = time.perf_counter() - began_s
        return seen_s, len(first) + len(await answer.read())


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


async def first_tokens(direct: str, through: str, kinds: Sequence[str], turn: int) -> Any:
    """Milliseconds to the first token, by kind and way; ways take turns."""
    seen: dict[str, list[float]] = {f"{kind} {way}": [] for kind in kinds for way in (0, 1)}
    async with client() as session:
        for number in range(turn * NUM_REQUESTS, (turn + 1) * NUM_REQUESTS):
            for kind in kinds:
                for way, url in enumerate((direct, through)):
                    seconds, _ = await ask(session, url, body(kind, number))
                    seen[f"{kind} {way}"].append(1e3 * seconds)
    found = {}
    for kind in kinds:
        straight, ours = sorted(seen[f"{kind} 0"]), sorted(seen[f"{kind} 1"])
        for name, part in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            at = int(part * NUM_REQUESTS)
            found[f"{kind}_added_{name}_ms"] = ours[at] - straight[at]
        found[f"{kind}_direct_p50_ms"] = straight[NUM_REQUESTS // 2]
    return found


async def streams(direct: str, through: str) -> dict[str, float]:
    """Chunks per second of both ways."""
    rates = []
    async with client() as session:
        for url in (direct, through):
            began_s = time.perf_counter()
            data = [body("ids", number, NUM_TOKENS) for number in range(NUM_STREAMS)]
            answers = await asyncio.gather(*(ask(session, url, one) for one in data))
            assert len({size for _, size in answers}) == 1
            rates.append(NUM_STREAMS * NUM_TOKENS / (time.perf_counter() - began_s))
    return {"streams_over_direct": rates[1] / rates[0], "streams_tokens_per_s": rates[1]}


async def many(url: str, top: psutil.Process) -> dict[str, float]:
    """Processor seconds per second of the front's processes, at a fixed rate."""
    parts = {"envoy": [], "picker": []}
    for one in top.children(recursive=True):
        parts["envoy" if "envoy" in Path(one.exe()).name else "picker"].append(one)

    def spent_s(processes: list[psutil.Process]) -> float:
        return sum(sum(one.cpu_times()[:2]) for one in processes)

    before = {name: spent_s(some) for name, some in parts.items()}
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    running = set()
    async with client() as session:
        for number in range(int(RATE * MANY_S)):
            await asyncio.sleep(max(0.0, began_s + number / RATE - loop.time()))
            running.add(asyncio.create_task(ask(session, url, body("ids", number))))
        seen = sorted(seconds for seconds, _ in await asyncio.gather(*running))
    took_s = loop.time() - began_s
    found = {
        f"many_{name}_cores": (spent_s(some) - before[name]) / took_s
        for name, some in parts.items()
    }
    return {
        **found,
        "many_requests_per_s": len(seen) / took_s,
        "many_ttft_p50_ms": 1e3 * seen[len(seen) // 2],
        "many_ttft_p99_ms": 1e3 * seen[int(len(seen) * 0.99)],
    }


async def measure(rounds: int, tokenizer: Path | None) -> list[dict[str, float]]:
    kinds = ("ids", "text") if tokenizer else ("ids",)
    found = []
    for turn in range(rounds):
        row: dict[str, float] = {}
        with tempfile.TemporaryDirectory(prefix="bench-front-") as text:
            folder = Path(text)
            async with servers(folder, 1) as ports, front(folder, ports, tokenizer) as (url, _):
                direct = f"http://127.0.0.1:{ports[0]}"
                await first_tokens(direct, url, kinds, rounds)  # what is made once
                row |= await first_tokens(direct, url, kinds, turn)
                row |= await streams(direct, url)
            async with (
                servers(folder, MANY_SERVERS) as ports,
                front(folder, ports, tokenizer) as (url, top),
            ):
                row |= await many(url, top)
        found.append(row)
        told = ", ".join(f"{name} {value:.2f}" for name, value in row.items())
        console.print(f"round {turn + 1}: {told}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="adds prompts of text")
    parser.add_argument("--json", metavar="FILE", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(measure(options.rounds, options.tokenizer))
    ratios = {name: spread([row[name] for row in rows]) for name in rows[0]}
    for name, one in ratios.items():
        console.print(f"{name} {one['value']:.2f} ({one['min']:.2f} to {one['max']:.2f})")
    settings = {
        "prompt_bytes": PROMPT_BYTES,
        "requests": NUM_REQUESTS,
        "streams": NUM_STREAMS,
        "tokens": NUM_TOKENS,
        "servers": MANY_SERVERS,
        "rate": RATE,
    }
    write_result(options.json, settings, ratios, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
