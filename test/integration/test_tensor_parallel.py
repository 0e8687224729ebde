"""Two ranks: one decision whatever their disks hold, checked by SGLang's own consensus checker.

The checker compares, in the background, every call of the cache that ranks must make alike, and
ours among them, and ends the server at the first difference.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from conftest import ALWAYS, Disk, Launch, aligned, ask, make_prompts, until
from kit.promtool import check_metrics
from kit.scrapes import by_rank
from server_process import Answer, Server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTH = 700
PROMPTS = make_prompts(5, 8, LENGTH)
LONG_LENGTH = 2000
LONG_PROMPTS = make_prompts(6, 3, LONG_LENGTH)
DEADLINE_S = 240.0
FAILED_READS = {"tier": "nvme", "operation": "load", "reason": "io_error"}
OLD, NEW = PROMPTS[:4], PROMPTS[4:]  # what both shards hold, and what one of them lost


@pytest.fixture(scope="module")
def expected(stock: Server) -> list[list[int]]:
    """What one rank without tiers answers."""
    return [answer.output_ids for answer in stock.generate_all(PROMPTS)]


def outputs(answers: list[Answer]) -> list[list[int]]:
    return [answer.output_ids for answer in answers]


def see_sick_rank(server: Server, disk: Disk, expected: list[list[int]]) -> None:
    """Let the disk of the second rank fail. Each rank has its own series, from before that."""

    def scraped(name: str, **labels: str) -> dict[str, float]:
        return by_rank(server.request("/metrics"), name, **labels)

    def held() -> dict[str, float]:
        return dict.fromkeys("01", server.tier_state()["tier_pages:nvme"])

    # Each rank publishes once a second, at its own moment.
    until(lambda: scraped("tier_pages", tier="nvme") == held(), "ranks hold other pages")
    assert scraped("tier_healthy", tier="nvme") == {"0": 1.0, "1": 1.0}
    assert scraped("page_outcomes_total", **FAILED_READS) == {"0": 0.0, "1": 0.0}
    disk.order(failing=["shard-tp1of2"])

    def is_seen() -> bool:
        server.flush()
        assert outputs(server.generate_all(PROMPTS, concurrency=4)) == expected
        return scraped("tier_healthy", tier="nvme") == {"0": 1.0, "1": 0.0}

    until(is_seen, "the failing disk of one rank is not seen", DEADLINE_S)
    failed = scraped("page_outcomes_total", **FAILED_READS)
    assert failed["0"] == 0 < failed["1"]
    assert server.tier_state()["tier_healthy:nvme"] == 1, "the first rank answers for itself"
    check_metrics(server.request("/metrics"))


def test_rank_with_older_shard_costs_only_hits(
    launch: Launch,
    expected: list[list[int]],
    disk: Disk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", "1")
    tier_dir = tmp_path / "kv"
    arguments = (
        *("--tp", "2", "--max-total-tokens", "2560", "--enable-metrics"),
        *("--tier-host-bytes", "40MiB", "--tier-dir", str(tier_dir), *ALWAYS),
    )
    server = launch(*arguments)
    assert "Rank consensus checker is enabled" in server.log
    assert outputs(server.generate_all(OLD, concurrency=2)) == expected[:4]
    server.flush()  # succeeds once every rank has stored everything
    (shard,) = tier_dir.glob("shard-tp1of2-*")
    earlier = shutil.copytree(shard, tmp_path / "earlier")
    assert outputs(server.generate_all(NEW, concurrency=2)) == expected[4:]

    together = server.generate_all(PROMPTS, concurrency=len(PROMPTS))
    assert outputs(together) == expected
    for tier in ("host", "storage"):
        assert any(answer.cached[tier] for answer in together)
    assert sum(answer.num_cached for answer in together) >= 0.97 * aligned(LENGTH) * len(PROMPTS)
    server.flush()
    server.kill()

    shutil.rmtree(shard)
    shutil.copytree(earlier, shard)
    restarted = launch(*arguments)
    pattern = r"(TP\d)\S*\] NVMe tier open: .*?, (\d+) pages of earlier runs found"
    found = {rank: int(number) for rank, number in re.findall(pattern, restarted.log)}
    assert found["TP0"] == 2 * found["TP1"] >= len(PROMPTS) * (LENGTH // 64)
    answers = restarted.generate_all(PROMPTS, concurrency=4)
    assert outputs(answers) == expected
    held = [aligned(LENGTH)] * 4 + [0] * 4
    assert [answer.cached["storage"] for answer in answers] == held, "the minimum over the ranks"

    # What was computed again has been stored again where it was missing.
    restarted.flush()
    again = restarted.generate_all(PROMPTS, concurrency=4)
    assert outputs(again) == expected
    assert [answer.cached["storage"] for answer in again] == [aligned(LENGTH)] * len(PROMPTS)
    assert restarted.tier_state()["tier_healthy:nvme"] == 1

    # A hint begins and proceeds on both ranks in the same steps, or the checker ends the server.
    restarted.flush()
    for prompt in PROMPTS[:2]:
        assert ask(restarted, "/tier/prefetch", {"input_ids": prompt})[0] == 202
    status, hinted = ask(restarted, "/tier/prefetch", {"input_ids": PROMPTS[1], "wait_s": 30})
    assert (status, hinted["num_in_memory"]) == (200, LENGTH // 64 * 64)
    hinted_answers = restarted.generate_all(PROMPTS[:2])
    assert outputs(hinted_answers) == expected[:2]
    assert [answer.cached["host"] for answer in hinted_answers] == [aligned(LENGTH)] * 2

    see_sick_rank(restarted, disk, expected)
    disk.order()
    restarted.kill()


def test_ranks_compute_both_ends_alike(
    launch: Launch, stock: Server, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk of each rank: what one of them is sooner done with must not decide alone."""
    expected = outputs(stock.generate_all(LONG_PROMPTS))
    disk.order()
    monkeypatch.setenv("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", "1")
    server = launch(
        *("--tp", "2", "--max-total-tokens", "4096", "--tier-host-bytes", "40MiB"),
        *("--tier-dir", str(tmp_path / "kv")),
    )
    assert outputs(server.generate_all(LONG_PROMPTS)) == expected

    def computes_both_ends() -> bool:
        state = server.tier_state()
        # Loading a prompt takes as long as computing it takes on this machine now.
        prompts_per_s = state["prefill_tokens_per_second"] / LONG_LENGTH
        prompt_bytes = state["tier_held_bytes:nvme"] / len(LONG_PROMPTS)
        disk.order(read_bytes_s=prompts_per_s * prompt_bytes)
        server.flush()
        assert outputs(server.generate_all(LONG_PROMPTS, concurrency=1)) == expected
        return server.tier_state()["both_ends_requests"] >= 6

    until(computes_both_ends, "no prompt is computed from both ends", DEADLINE_S)
    disk.order()
    server.flush()  # refused while anything is locked or under way
    assert outputs(server.generate_all(LONG_PROMPTS, concurrency=3)) == expected
    server.kill()
