"""Fronts that people run, before a modelled fleet in real time (``docs/cluster.md``).

    python benchmark/bench_routing_front.py [TRACE ...] [--loads N,...] [--seeds N,...]

The data planes are real: Envoy with our picker, Envoy alone, sglang-router; the servers behind are
the simulator's, over HTTP, in the same process as the client. The windows of Mooncake's traces
below ``$SGLANG_TIERED_DATA``, or a generated trace, are sent in open loop; load 1 is where requests
in turn keep the servers busy for 80% of the time. Arms take turns. Time to first token is the
client's.

``cost``
    Envoy and the picker, with costs and events.
``admission``
    The same, with a class that has a limit (``--classes``): what no server promises to answer in
    that time is refused.
``least-tokens``
    The same picker before servers that tell neither.
``least-request``
    Envoy alone, by its own rule.
``cache-aware``
    sglang-router 0.3.2, set as ``bench_routing`` found best (0.7, 4, 1.1), by the prompts' letters.
``smg``
    Its successor, with the same settings: ``--smg PROGRAM`` names it, in an environment of its own
    (``pip install smg==1.13.0``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from rich.console import Console

from bench_routing import MOONCAKE, Scale, make_plan, requests_of, speed_of
from front_bench.modelled import ModelledFleet, ids_of, text_of
from front_bench.result import spread, write_result
from server_process import free_ports
from sglang_tiered.route.envoy import CLUSTERS, configuration, program_of, write_members
from sglang_tiered.route.settings import RouteConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from sglang_tiered_lab.trace.replay.server import Request

ARMS = ("cost", "admission", "least-tokens", "least-request", "cache-aware")
PRICED = ("cost", "admission")
LETTERS = ("cache-aware", "smg")
"""Arms that compare prompts as text."""
TUNED = (
    "--cache-threshold",
    "0.7",
    "--balance-abs-threshold",
    "4",
    "--balance-rel-threshold",
    "1.1",
)
TRACES = (*MOONCAKE, "generated")
READY_S, ANSWER_S = 180.0, 300.0
ROUTER_LOG = "error"

console = Console()


def command_of(arm: str, port: int, ports: Sequence[int], folder: Path, smg: str) -> list[str]:
    urls = [f"http://127.0.0.1:{one}" for one in ports]
    if arm in LETTERS:
        router = [sys.executable, "-m", "sglang_router.launch_router"]
        command = [*([smg, "launch"] if arm == "smg" else router), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--policy", "cache_aware", *TUNED, "--worker-urls", *urls]
        return [*command, "--prometheus-port", str(port + 1), "--log-level", ROUTER_LOG]
    if arm == "least-request":
        config = RouteConfig(servers="-", port=port)
        made = configuration(config, folder, folder)
        inner = made["static_resources"]["listeners"][1]["filter_chains"][0]["filters"][0]
        del inner["typed_config"]["http_filters"][0]  # which asks the picker
        for cluster in CLUSTERS:
            members = [f"127.0.0.1:{one}" for one in ports] if cluster == "pool" else []
            write_members(folder, cluster, members)
        (folder / "envoy.json").write_text(json.dumps(made))
        command = [program_of(config), "-c", str(folder / "envoy.json"), "-l", "error"]
        return [*command, "--use-dynamic-base-id", "--concurrency", "1"]
    (folder / "servers").write_text("\n".join(urls))
    command = [sys.executable, "-m", "sglang_tiered", "route", "serve", "--port", str(port)]
    command += ["--servers", str(folder / "servers"), "--pick-timeout", "2s"]
    if arm == "admission":
        limit_s = make_plan().ttft_s
        classes = f"default: all\nclasses:\n  all:\n    ttft: {limit_s:g}s\n"
        (folder / "classes").write_text(classes)
        command += ["--classes", str(folder / "classes")]
    return command


@contextlib.asynccontextmanager
async def front(arm: str, ports: Sequence[int], folder: Path, smg: str) -> AsyncIterator[int]:
    """A data plane before servers that listen already. Yields its port once it passes requests to
    all of them."""
    port = free_ports(3)
    with (folder / "log").open("wb") as log:
        command = command_of(arm, port, ports, folder, smg)
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        async with asyncio.timeout(READY_S), aiohttp.ClientSession() as session:
            while not await _is_ready(session, arm, port, len(ports)):
                assert process.poll() is None, (folder / "log").read_text()[-2000:]
                await asyncio.sleep(0.1)
        yield port
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, READY_S)


async def _is_ready(session: aiohttp.ClientSession, arm: str, port: int, number: int) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        if arm in (*PRICED, "least-tokens"):
            async with session.get(f"http://127.0.0.1:{port + 2}/servers") as answer:
                rows = (await answer.json())["servers"]
                if sum(row["ready"] for row in rows) < number:
                    return False
        path = "readiness" if arm in LETTERS else "health"
        async with session.get(f"http://127.0.0.1:{port}/{path}") as answer:
            return answer.status == 200
    return False


async def run_arm(
    arm: str, requests: Sequence[Request], speed: float, servers: int, folder: Path, smg: str = ""
) -> dict[str, Any]:
    """Send all requests. Returns what clients saw."""
    plan = make_plan(scale=Scale(servers, len(requests)))
    ports = [free_ports(2) for _ in range(servers)]
    fleet = ModelledFleet(plan, requests, ports, is_priced=arm in PRICED)
    await fleet.start()
    ttft_s: list[float] = []
    failed = refused = 0
    loop = asyncio.get_running_loop()

    async def ask(session: aiohttp.ClientSession, number: int, url: str, due_s: float) -> None:
        nonlocal failed, refused
        one = requests[number]
        prompt = text_of(one) if arm in LETTERS else ids_of(one)
        body = {"model": "m", "prompt": prompt, "user": str(number), "stream": True}
        data = json.dumps({**body, "max_tokens": max(1, one.output_tokens)}).encode()
        headers = {"Content-Type": "application/json"}
        await asyncio.sleep(due_s - loop.time())
        try:
            async with session.post(url, data=data, headers=headers) as answer:
                await answer.content.readany()
                seen_s = loop.time() - due_s
                if answer.status == 200:
                    ttft_s.append(seen_s)
                elif answer.status == 429:
                    refused += 1
                else:
                    failed += 1
                await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            failed += 1

    try:
        async with front(arm, ports, folder, smg) as port:
            url = f"http://127.0.0.1:{port}/v1/completions"
            timeout = aiohttp.ClientTimeout(total=ANSWER_S)
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
                begin_s, first_s = loop.time() + 1.0, requests[0].arrival_s
                running: set[asyncio.Task[None]] = set()
                for number, one in enumerate(requests):
                    due_s = begin_s + (one.arrival_s - first_s) / speed
                    await asyncio.sleep(max(0.0, due_s - loop.time() - 0.05))
                    running.add(asyncio.create_task(ask(session, number, url, due_s)))
                await asyncio.gather(*running)
    finally:
        await fleet.close()
    ttft_s.sort()
    return {
        "arm": arm,
        "answered": len(ttft_s),
        "refused": refused,
        "failed": failed,
        "within": sum(each <= plan.ttft_s for each in ttft_s) / len(requests),
        "mean_ttft_s": statistics.fmean(ttft_s),
        "p50_ttft_s": ttft_s[len(ttft_s) // 2],
        "p99_ttft_s": ttft_s[int(len(ttft_s) * 0.99)],
        "hit_rate": fleet.cached_tokens / fleet.prompt_tokens,
        "requests_by_server": fleet.num_served,
    }


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``cost`` over each other arm, of the same trace, seed and load, and each arm's share of all
    requests whose first token came within the limit: medians of the seeds."""
    found: dict[str, list[float]] = {}
    for row in rows:
        name = f"{row['trace']}_{row['arm']}_{row['load']:g}_within_limit"
        found.setdefault(name, []).append(row["within"])
    places = {(row["trace"], row["seed"], row["load"], row["arm"]): row for row in rows}
    for (trace, seed, load, arm), row in places.items():
        ours = places.get((trace, seed, load, "cost"))
        if arm not in PRICED and ours is not None:
            for figure in ("mean", "p99"):
                name = f"{trace}_cost_over_{arm}_{load:g}_{figure}_ttft"
                value = ours[f"{figure}_ttft_s"] / row[f"{figure}_ttft_s"]
                found.setdefault(name, []).append(value)
    return {name: spread(values) for name, values in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    known = ", ".join(TRACES)
    parser.add_argument("traces", metavar="TRACE", nargs="*", help=f"of {known}; all without")
    parser.add_argument("--loads", default="0.7,1,1.2", help="default 0.7,1,1.2")
    parser.add_argument("--seeds", default="0,1,2,3", help="windows of the trace; default 0,1,2,3")
    parser.add_argument("--servers", type=int, default=8, help="of 1 to 16; default 8")
    parser.add_argument("--requests", type=int, default=800, help="of a window; default 800")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"default {','.join(ARMS)}")
    parser.add_argument("--smg", metavar="PROGRAM", default="", help="adds the arm smg")
    parser.add_argument("--json", metavar="FILE", type=Path)
    options = parser.parse_args()
    if unknown := set(options.traces) - set(TRACES):
        parser.error(f"{', '.join(sorted(unknown))} is no trace; choose from {known}")
    arms = options.arms.split(",") + ["smg"] * bool(options.smg)
    if unknown := set(arms) - {*ARMS, "smg"}:
        parser.error(f"{', '.join(sorted(unknown))} is no arm; choose from {', '.join(ARMS)}")
    if not 1 <= options.servers <= 16:
        parser.error(f"--servers {options.servers} is not from 1 to 16")
    if "SGLANG_TIERED_DATA" not in os.environ:
        parser.error("SGLANG_TIERED_DATA must name the folder of the traces")
    # sglang-router asks whether servers speak HTTP/2.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    scale = Scale(options.servers, options.requests)
    rows = []
    for trace in options.traces or TRACES:
        for seed in map(int, options.seeds.split(",")):
            requests = requests_of(trace, seed, scale)
            unit = speed_of(trace, seed, scale)
            for turn, load in enumerate(map(float, options.loads.split(","))):
                for place in range(len(arms)):
                    arm = arms[(place + turn + seed) % len(arms)]
                    with tempfile.TemporaryDirectory(prefix="bench-front-") as folder:
                        run = run_arm(
                            arm, requests, load * unit, options.servers, Path(folder), options.smg
                        )
                        row = {"trace": trace, "seed": seed, "load": load, **asyncio.run(run)}
                    rows.append(row)
                    console.print(
                        f"{trace:12} seed {seed} load {load:<4g} {arm:14} TTFT "
                        f"{row['mean_ttft_s']:.3f} s p99 {row['p99_ttft_s']:.2f} s hit "
                        f"{row['hit_rate']:.3f} answered {row['answered']} within the limit "
                        f"{row['within']:.3f} refused {row['refused']} failed {row['failed']}"
                    )
    found = ratios(rows)
    for name, one in found.items():
        console.print(f"{name} {one['value']:.2f}")
    settings = {"servers": options.servers, "requests": options.requests, "router": TUNED}
    write_result(options.json, settings, found, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
