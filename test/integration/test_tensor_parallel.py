"""Two ranks: one decision whatever their disks hold, checked by SGLang's own consensus checker.

The checker compares, in the background, every call of the cache that ranks must make alike, and
ours among them, and ends the server at the first difference.
"""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from conftest import ALWAYS, Launch, aligned, make_prompts

if TYPE_CHECKING:
    from pathlib import Path

    from server_process import Answer, Server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTH = 700
PROMPTS = make_prompts(5, 12, LENGTH)
OLD, NEW = PROMPTS[:6], PROMPTS[6:]  # what both shards hold, and what one of them lost


@pytest.fixture(scope="module")
def expected(stock: Server) -> list[list[int]]:
    """What one rank without tiers answers."""
    return [answer.output_ids for answer in stock.generate_all(PROMPTS)]


def outputs(answers: list[Answer]) -> list[list[int]]:
    return [answer.output_ids for answer in answers]


def pages_found(server: Server) -> dict[str, int]:
    """Pages that each rank found in its shard at start, by rank."""
    pattern = r"(TP\d)\S*\] NVMe tier open: .*?, (\d+) pages of earlier runs found"
    return {rank: int(number) for rank, number in re.findall(pattern, server.log)}


def test_rank_with_older_shard_costs_only_hits(
    launch: Launch,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", "1")
    tier_dir = tmp_path / "kv"
    arguments = (
        *("--tp", "2", "--max-total-tokens", "4096"),
        *("--tier-host-bytes", "40MiB", "--tier-dir", str(tier_dir), *ALWAYS),
    )
    server = launch(*arguments)
    assert "Rank consensus checker is enabled" in server.log
    assert outputs(server.generate_all(OLD, concurrency=2)) == expected[:6]
    server.flush()  # succeeds once every rank has stored everything
    (shard,) = tier_dir.glob("shard-tp1of2-*")
    earlier = shutil.copytree(shard, tmp_path / "earlier")
    assert outputs(server.generate_all(NEW, concurrency=2)) == expected[6:]

    together = server.generate_all(PROMPTS, concurrency=len(PROMPTS))
    assert outputs(together) == expected
    assert {tier for answer in together for tier in answer.cached if answer.cached[tier]} >= {
        "host",
        "storage",
    }
    assert sum(answer.num_cached for answer in together) >= 0.97 * aligned(LENGTH) * len(PROMPTS)
    server.flush()
    server.kill()

    shutil.rmtree(shard)
    shutil.copytree(earlier, shard)
    restarted = launch(*arguments)
    found = pages_found(restarted)
    assert found["TP0"] == 2 * found["TP1"] >= len(PROMPTS) * (LENGTH // 64)
    answers = restarted.generate_all(PROMPTS, concurrency=4)
    assert outputs(answers) == expected
    held = [aligned(LENGTH)] * 6 + [0] * 6
    assert [answer.cached["storage"] for answer in answers] == held, "the minimum over the ranks"

    # What was computed again has been stored again where it was missing.
    restarted.flush()
    again = restarted.generate_all(PROMPTS, concurrency=4)
    assert outputs(again) == expected
    assert [answer.cached["storage"] for answer in again] == [aligned(LENGTH)] * len(PROMPTS)
    assert restarted.tier_state()["nvme_healthy"] == 1
    restarted.kill()
