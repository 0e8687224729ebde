"""Two servers with different models share one budget of NVMe: who is busy has it."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from conftest import ALWAYS, SMALL_REGIONS, Launch, aligned, make_prompts
from kit.small_model import write_small_model
from kit.waiting import eventually
from server_process import Server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

MIB = 1 << 20
LENGTH = 640
ADAPTED_S = 120.0
TOTAL, FLOOR = 64 * MIB, 8 * MIB


def finds_most(server: Server, prompts: list[list[int]]) -> None:
    """Ask until so much of a round is found on NVMe as 1.3 times what a fixed half can hold. Device
    and host memory are empty before each round."""
    deadline, rates = time.monotonic() + ADAPTED_S, [0.0]
    while rates[-1] < 1.3 / 1.6:
        assert time.monotonic() < deadline, rates
        server.flush()
        order = random.Random(len(rates)).sample(prompts, len(prompts))
        answers = [server.generate(prompt, num_new=1) for prompt in order]
        rates.append(sum(a.cached["storage"] for a in answers) / (len(prompts) * aligned(LENGTH)))
    server.flush()


def capacity(server: Server) -> float:
    return server.tier_state()["tier_capacity_bytes:nvme"]


def test_the_busy_server_has_the_others_room(
    launch: Launch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other_model = write_small_model(tmp_path_factory.mktemp("model") / "other", seed=1)
    shared = (
        *("--max-total-tokens", "1024", "--tier-host-bytes", "10MiB", *ALWAYS, *SMALL_REGIONS),
        *("--tier-machine-budget", str(tmp_path / "budget"), "--tier-nvme-bytes", "64MiB"),
    )
    a = launch(*shared, "--tier-dir", str(tmp_path / "a"))
    b = launch(*shared, "--tier-dir", str(tmp_path / "b"), model_path=other_model)
    state = a.tier_state()
    assert state["nvme_shared_bytes"] == TOTAL and state["nvme_floor_bytes"] == FLOOR
    page_bytes = a.tier_state()["tier_capacity_bytes:host"] / state["tier_capacity_tokens:host"]
    num = int(0.8 * TOTAL / (page_bytes * aligned(LENGTH)))  # of half of the budget 1.6 times
    prompts = {server.port: make_prompts(server.port, num, LENGTH) for server in (a, b)}
    for busy in (b, a):
        finds_most(busy, prompts[busy.port])
        eventually(lambda: capacity(a) + capacity(b) <= TOTAL, "they are not asked at one moment")
        assert min(capacity(a), capacity(b)) >= FLOOR
    a.kill()
    b.kill()
