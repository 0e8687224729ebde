"""Live servers under everything at once, for as long as ``scripts/soak live`` says.

Lives of servers, drawn from a seed: topology, flags, what the asynchronous platform does. Each life
has rounds of clients and an operator that act at random; after each the servers come to rest, and
no answer was wrong, nothing is under way, lost or left over. With ``LIVE_SOAK_TOPOLOGY`` there is
one life, of that topology. ``SOAK_SEED`` draws the same lives and
the same choices again; how they interleave is the machine's.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import Resources, at_rest
from clients import Answers, Client
from life import Life, Record, Violation
from operator_actions import Operator
from world import DEADLINE_S, TOPOLOGIES, Setup, World

SECONDS = float(os.environ.get("LIVE_SOAK_SECONDS", "0"))
SEED = int(os.environ.get("SOAK_SEED", "0"))
ONLY = os.environ.get("LIVE_SOAK_TOPOLOGY")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(0),
    pytest.mark.skipif(SECONDS <= 0, reason="LIVE_SOAK_SECONDS is not set; run scripts/soak live"),
]

ROOT = Path(__file__).parents[2]
ROUNDS_OF_A_LIFE = 4
MIN_ROUND_S, MAX_ROUND_S = 15.0, 35.0
NUM_CLIENTS = 6


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Path]:
    names = ("first",) if ONLY == "peers" else ("first", "second")  # weights that are updated
    paths = {name: tmp_path / f"model-{name}" for name in names}
    for seed, path in enumerate(paths.values()):
        maker = [sys.executable, str(ROOT / "scripts" / "make_demo_model.py"), str(path)]
        subprocess.run([*maker, f"--seed={seed}"], check=True, timeout=120)
    return paths


@pytest.fixture
def answers(models: dict[str, Path], tmp_path: Path) -> Iterator[Answers]:
    answers = Answers(models, tmp_path)
    yield answers
    for server in answers.servers.values():
        server.kill()


def test_live_servers_answer_right_and_leave_nothing(
    models: dict[str, Path], answers: Answers, tmp_path: Path
) -> None:
    end = time.monotonic() + SECONDS
    source, record = random.Random(SEED), Record()
    place = "start"
    record.say(f"live soak, seed {SEED}")
    try:
        for number in range(sys.maxsize):
            setup = Setup.draw(source, ONLY or TOPOLOGIES[number % len(TOPOLOGIES)])
            folder = tmp_path / f"life-{number}"
            folder.mkdir()
            place = f"life {number}: {setup}"
            record.say(place)
            world = World(models["first"], folder, setup, seed=source.randrange(1 << 30))
            try:
                world.spawn()
                for server in answers.servers.values():
                    server.wait_until_it_generates()
                world.wait_until_ready()
                life = Life(world, answers, record, models)
                resources = Resources()
                for turn in range(sys.maxsize if ONLY else ROUNDS_OF_A_LIFE):
                    place = f"life {number}, round {turn}: {setup}"
                    play(life, f"{SEED}-{number}-{turn}", end)
                    at_rest(life, source, resources)
                    record.count("rounds", setup.topology)
                    record.say(f"life {number}, round {turn} at rest")
                    if time.monotonic() >= end:
                        break
                if time.monotonic() >= end:
                    return
            finally:
                world.close()
    except AssertionError as error:
        record.did("VIOLATION")
        actions = "\n".join(record.recent)
        raise Violation(
            f"seed {SEED}, {place}\nlogs in {tmp_path}\nlast actions:\n{actions}\n{error}"
        ) from error
    finally:
        for group, counted in record.counts.items():
            print(f"{group}: {dict(sorted(counted.items()))}", flush=True)


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
