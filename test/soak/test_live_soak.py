"""Live servers under everything at once, for as long as ``scripts/soak live`` says.

Lives of servers, drawn from a seed: topology, flags, what the asynchronous platform does. Each life
has rounds of clients and an operator that act at random; after each the servers come to rest, and
no answer was wrong, nothing is under way, lost or left over. With ``LIVE_SOAK_TOPOLOGY`` there is
one life, of that topology. ``SOAK_SEED`` draws the same lives and the same choices again; how they
interleave is the machine's.
"""

from __future__ import annotations

import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import report
from clients import Client, Life, Violation, ask
from operator_actions import Operator, flush
from rest import drained
from world import DEADLINE_S, TOPOLOGIES, Setup, World

from kit.small_model import write_small_model
from server_process import Server

SECONDS = float(os.environ.get("LIVE_SOAK_SECONDS", "0"))
SEED = int(os.environ.get("SOAK_SEED", "0"))
ONLY = os.environ.get("LIVE_SOAK_TOPOLOGY")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(0),
    pytest.mark.skipif(SECONDS <= 0, reason="LIVE_SOAK_SECONDS is not set; run scripts/soak live"),
]

ROUNDS_OF_A_LIFE = 4
MIN_ROUND_S, MAX_ROUND_S = 15.0, 35.0
NUM_CLIENTS, NUM_PROBES = 6, 3
SLACK_THREADS = 8
GAUGES = (
    *("tier_inflight_jobs:peer", "tier_queued_store_bytes:object", "peer_servers_withheld"),
    *("spill_waiting_tokens", "spill_inflight_tokens", "tier_inflight_jobs:nvme"),
    *("tier_queued_store_bytes:nvme", "demotion_backlog_pages"),
)
TROUBLE = re.compile(
    r"Traceback|memory leak|[Ee]xception in|Scheduler hit|Segmentation|RuntimeError|AssertionError"
)
ALLOWED = "post-warmup freeze_gc failed"
"""A message that looks like trouble with what follows it, and is none. SGLang asks itself to freeze
its garbage collector, at times before it listens."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_small_model(tmp_path / "model")


@pytest.fixture
def stock(model: Path, tmp_path: Path) -> Iterator[Server]:
    flags = ("--tier-mode", "off", "--max-total-tokens", "16384", "--sleep-on-idle")
    with Server.start(model, tmp_path / "stock.log", *flags) as server:
        yield server


def test_live_servers_answer_right_and_leave_nothing(
    model: Path, stock: Server, tmp_path: Path
) -> None:
    end, source, counts = time.monotonic() + SECONDS, random.Random(SEED), Counter[str]()
    for number in range(sys.maxsize):
        setup = Setup.draw(source, ONLY or TOPOLOGIES[number % len(TOPOLOGIES)])
        folder = tmp_path / f"life-{number}"
        folder.mkdir()
        world = World(model, folder, setup, seed=source.randrange(1 << 30))
        life, threads = Life(world, stock, counts), dict[int, int]()
        try:
            world.spawn()
            world.wait_until_ready()
            for turn in range(sys.maxsize if ONLY else ROUNDS_OF_A_LIFE):
                play(life, f"{SEED}-{number}-{turn}", end)
                at_rest(life, source, threads)
                print(f"life {number} ({setup}), round {turn} at rest: {dict(counts)}", flush=True)
                if time.monotonic() >= end:
                    return
        except AssertionError as error:
            done = "\n".join(life.done[-60:])
            raise Violation(
                f"seed {SEED}, life {number}: {setup}\nlogs in {tmp_path}\n{done}\n{error}"
            ) from error
        finally:
            world.close()


def play(life: Life, seed: str, end: float) -> None:
    """One round: everybody acts at random until the time is up or something is wrong."""
    source = random.Random(seed)
    life.ends.clear()
    seconds = min(source.uniform(MIN_ROUND_S, MAX_ROUND_S), max(5.0, end - time.monotonic()))
    actors = [Client(life, f"{seed}-{number}") for number in range(NUM_CLIENTS)]
    actors.append(Operator(life, f"{seed}-operator"))
    for actor in actors:
        actor.start()
    life.ends.wait(seconds)
    life.ends.set()
    for actor in actors:
        actor.join(3 * DEADLINE_S)
        if actor.is_alive():
            raise Violation(f"{actor.name} hangs")
    if life.errors:
        raise life.errors[0]


def at_rest(life: Life, source: random.Random, threads: dict[int, int]) -> None:
    """Waits until nothing is under way; nothing is left over, lost or wrong then. ``threads``: of
    each process at its first rest."""
    nobody_died(life)
    life.until(lambda: left_over(life), "is still under way")
    for _ in range(NUM_PROBES):
        if prompt := life.any_held(source):
            life.until(lambda p=prompt: 400 in flush(life, source, p), "refuses to flush")
            ask(life, source, prompt)
    life.until(lambda: left_over(life), "is still under way")
    if life.world.setup.topology != "ranks":  # locks and lost pages that a flush would hide
        order = f"{source.getrandbits(64):016x}"
        life.world.drain(order)

        def missing() -> int:
            seams = report.read(life.world.report).seams
            ended = sum(seam.startswith(drained(order, 0)[:-1]) for seam in seams)
            return len(life.world.servers) - ended

        life.until(missing, "schedulers did not come to rest")
    nobody_died(life)
    for server in life.world.servers.values():
        parent = psutil.Process(server.process.pid)
        for process in [parent, *parent.children(recursive=True)]:
            now = process.num_threads()
            if now > threads.setdefault(process.pid, now) + SLACK_THREADS:
                raise Violation(f"{process} has {now} threads, after {threads[process.pid]}")
    seen = report.read(life.world.report)
    if seen.violations:
        raise Violation(f"the asynchronous platform saw:\n{seen.told()}")


def left_over(life: Life) -> dict[str, Any]:
    """What is under way, or ill."""
    left: dict[str, Any] = {}
    for role, server in life.world.servers.items():
        (state, *_) = server.request("/server_info")["internal_states"]
        tiers, rooms = state["sglang_tiered"], state.get("sglang_tiered_transfer", {})
        left |= {f"{role} {name}": tiers[name] for name in GAUGES if tiers.get(name)}
        for tier in ("nvme", "object", "peer"):
            if tiers.get(f"tier_healthy:{tier}", 1) != 1:
                left[f"{role} {tier}"] = tiers.get(f"tier_unhealthy_because:{tier}", "ill")
        if rooms.get("transfer_rooms"):
            left[f"{role} rooms"] = rooms
        text = str(life.world.ask(role, "/metrics").body)
        asked = re.findall(r"^(sglang:num_(?:running|queue)_reqs)\{[^}]*\} (\S+)$", text, re.M)
        left |= {f"{role} {name}": value for name, value in asked if float(value)}
    return left


def nobody_died(life: Life) -> None:
    for role, server in life.world.servers.items():
        if server.process.poll() is not None or life.world.ask(role, "/health").status != 200:
            raise Violation(f"{role} ended or is ill:\n{server.log[-3000:]}")
    for log in sorted(life.world.folder.glob("*.log")):
        lines, is_allowed = log.read_text(errors="replace").splitlines(), False
        for number, line in enumerate(lines):
            if line.startswith("["):  # a message; what it brings follows it
                is_allowed = ALLOWED in line
            if TROUBLE.search(line) and not is_allowed:
                around = "\n".join(lines[max(0, number - 5) : number + 30])
                raise Violation(f"{log.name} has trouble in line {number + 1}:\n{around}")
