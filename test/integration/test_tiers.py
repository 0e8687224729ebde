"""Evicted prefixes come back from host memory and NVMe, bit for bit, and survive ``kill -9``."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import SMALL, SMALL_REGIONS, Launch, aligned, make_prompts
from server_process import Answer, Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

NUM_PROMPTS, LENGTH = 20, 700
PROMPTS = make_prompts(1, NUM_PROMPTS, LENGTH)
PAGE_TOKENS = aligned(LENGTH) * NUM_PROMPTS


@pytest.fixture(scope="module")
def expected(stock: Server) -> list[list[int]]:
    answers = stock.generate_all(PROMPTS)
    assert "sglang_tiered" not in stock.request("/server_info")["internal_states"][0]
    return [answer.output_ids for answer in answers]


@pytest.fixture(scope="module")
def tier_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier") / "kv"


@pytest.fixture(scope="module")
def first_server(launch: Launch, tier_dir: Path) -> Server:
    return launch(*SMALL, *SMALL_REGIONS, "--tier-dir", str(tier_dir))


@pytest.fixture(scope="module")
def rounds(first_server: Server) -> list[list[Answer]]:
    """Three rounds: in turn, together, and in turn again."""
    return [first_server.generate_all(PROMPTS, concurrency=number) for number in (4, 1, 8)]


def tokens_from(answers: list[Answer], *tiers: str) -> int:
    return sum(answer.cached[tier] for answer in answers for tier in tiers)


def test_rounds_hit_what_was_computed(
    rounds: list[list[Answer]], expected: list[list[int]]
) -> None:
    for answers in rounds:
        assert [answer.output_ids for answer in answers] == expected
    assert tokens_from(rounds[0], "device", "host", "storage") == 0
    for answers in rounds[1:]:
        assert tokens_from(answers, "device", "host", "storage") >= 0.97 * PAGE_TOKENS
        assert tokens_from(answers, "storage") > 0
    # Not yet in the second round: the burst of the first took the residents' room.
    assert tokens_from(rounds[2], "host") > 0


class TestAfterKill:
    """The first server is killed with everything written; others start on its directory."""

    @pytest.fixture(scope="class")
    @classmethod
    def restarted(
        cls, launch: Launch, first_server: Server, rounds: list[list[Answer]], tier_dir: Path
    ) -> Server:
        first_server.wait_for_state("tier_pages:nvme", NUM_PROMPTS * (LENGTH // 64))
        first_server.kill()
        return launch(*SMALL, *SMALL_REGIONS, "--tier-dir", str(tier_dir))

    def test_restart_serves_durable_pages(
        self, restarted: Server, expected: list[list[int]]
    ) -> None:
        answers = restarted.generate_all(PROMPTS, concurrency=2)
        assert [answer.output_ids for answer in answers] == expected
        assert tokens_from(answers, "host", "storage") >= 0.97 * PAGE_TOKENS

    @pytest.mark.slow
    def test_damaged_files_become_misses_and_one_log_line(
        self, launch: Launch, restarted: Server, tier_dir: Path, expected: list[list[int]]
    ) -> None:
        restarted.kill()
        regions = sorted(tier_dir.rglob("region-*.kv"))
        assert len(regions) >= 3
        regions[-1].unlink()
        with regions[-2].open("r+b") as region:
            region.truncate(regions[-2].stat().st_size // 2 + 1000)
        for region_path in regions[:-2]:
            flip_bytes(region_path)
        server = launch(*SMALL, *SMALL_REGIONS, "--tier-dir", str(tier_dir))
        answers = server.generate_all(PROMPTS)
        assert [answer.output_ids for answer in answers] == expected
        state = server.tier_state()
        assert state["page_outcomes:nvme:load:corrupt"] > 0
        warnings = [line for line in server.log.splitlines() if "damaged pages" in line]
        assert 1 <= len(warnings) <= len(regions), warnings
        # What was found damaged is computed again and stored again. A load is read in parts and
        # ends with the first damaged one, so on a slow disk the next part is found a round later.
        for _ in range(4):
            again = server.generate_all(PROMPTS)
            assert [answer.output_ids for answer in again] == expected
            if tokens_from(again, "device", "host", "storage") >= 0.97 * PAGE_TOKENS:
                return
        pytest.fail("it is not stored again")


def flip_bytes(path: Path, step: int = 96 * 1024) -> None:
    """Flip one bit every ``step`` bytes of the file, past its first block."""
    size = path.stat().st_size
    with path.open("r+b") as region:
        for offset in range(4096 + 777, size, step):
            region.seek(offset)
            byte = region.read(1)[0]
            region.seek(offset)
            region.write(bytes([byte ^ 0x10]))
