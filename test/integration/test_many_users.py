"""More users than device and host memory hold, in a closed loop. A server that computes what it
waits for has those behind wait for longer, which compute then, until all hits are lost."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import Launch, aligned
from serving_bench.client import Request
from serving_bench.users import User
from sglang_tiered.demo.model import SHAPES, write_model

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_USERS, NUM_TURNS = 20, 5
SHORTEST, LONGEST, NUM_NEW, NUM_OUTPUT = 768, 1472, 96, 4
TOKENS = 8192  # of the device, and of host memory: seven of the users


def test_a_crowd_finds_what_it_said_before(launch: Launch, tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model, 0, SHAPES["24m"])
    server = launch(
        *("--max-total-tokens", str(TOKENS), "--hicache-ratio", "1"),
        *("--tier-nvme-bytes", "2GiB", "--tier-dir", str(tmp_path / "kv")),
        model_path=model,
    )
    users = [
        User(str(number), SHORTEST, LONGEST, NUM_NEW, NUM_OUTPUT, random.Random(number))
        for number in range(NUM_USERS)
    ]

    def say(user: User, request: Request) -> float:
        """The share that was found of what could be."""
        answer = server.generate(list(request.prompt), NUM_OUTPUT)
        user.answered(request, answer)
        return answer.num_cached / (aligned(request.num_reusable) or 1)

    def talk(user: User) -> list[float]:
        return [say(user, user.turn()) for _ in range(NUM_TURNS)]

    for user in users:
        say(user, user.first_turn())
    with ThreadPoolExecutor(NUM_USERS) as pool:
        shares = [share for each in pool.map(talk, users) for share in each]
    assert sum(shares) / len(shares) > 0.7
