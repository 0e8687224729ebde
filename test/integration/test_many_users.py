"""More than memory holds: users in a closed loop, and a context of 100,000 tokens."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import ALWAYS, PAGE, Launch, aligned, make_prompts
from server_process import Answer
from serving_bench.client import Request
from serving_bench.users import User
from sglang_tiered.demo.model import SHAPES, Shape, write_model

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_USERS, NUM_TURNS = 20, 5
SHORTEST, LONGEST, NUM_NEW, NUM_OUTPUT = 768, 1472, 96, 4
TOKENS = 8192  # of the device, and of host memory: seven of the users

LENGTH = 100_000
# Attention is nearly all of the work: with one head a CPU computes so many tokens in minutes.
SHAPE = Shape(128, num_layers=1, num_kv_heads=1, intermediate_size=256, num_query_heads=1)


def test_a_crowd_finds_what_it_said_before(launch: Launch, tmp_path: Path) -> None:
    """A server that computes what it waits for has those behind wait for longer, which compute
    then, until all hits are lost."""
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


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_turn_of_a_hundred_thousand_tokens_returns(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches NVMe whole, and its next turn comes from there."""
    monkeypatch.setattr("server_process.REQUEST_DEADLINE_S", 600.0)
    monkeypatch.setattr("sglang_tiered.demo.model.MAX_POSITIONS", 1 << 17)
    write_model(tmp_path / "model", 0, SHAPE)
    (context,), (turn,) = make_prompts(51, 1, LENGTH), make_prompts(52, 1, 500)

    def ask(*arguments: str) -> tuple[Answer, Answer]:
        size = ("--max-total-tokens", str(LENGTH + 4096))
        server = launch(*size, *arguments, model_path=tmp_path / "model")
        first = server.generate(context, 16)
        if "off" not in arguments:
            server.wait_for_state("tier_pages:nvme", aligned(LENGTH) // PAGE)
            server.flush()
        second = server.generate(context + first.output_ids + turn, 16)
        server.kill()
        return first, second

    first, second = ask("--tier-dir", str(tmp_path / "kv"), *ALWAYS)
    expected = ask("--tier-mode", "off")
    assert [first.output_ids, second.output_ids] == [each.output_ids for each in expected]
    assert second.cached["storage"] == aligned(LENGTH + 16)
