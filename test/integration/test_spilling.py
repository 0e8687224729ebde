"""A disk slower than what is computed: nothing fails, and what is lost is counted by cause."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import SMALL, Disk, Launch, make_prompts, until
from server_process import Server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTH = 700
CRAWL = 300e3  # bytes per second: a second and a half for the pages of a prompt


def wait_until_clean(server: Server) -> None:
    """Wait until no store waits for the disk."""

    def is_clean() -> bool:
        state = server.tier_state()
        return not state["spill_waiting_tokens"] and not state["spill_inflight_tokens"]

    until(is_clean, "stores still wait", 60.0)


@pytest.fixture(scope="module")
def server(launch: Launch, disk: Disk, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return launch(*SMALL, "--tier-dir", str(tmp_path_factory.mktemp("tier") / "kv"))


def test_splitting_and_evicting_waiting_nodes_breaks_nothing(server: Server, disk: Disk) -> None:
    """Random chains over few stems, on a disk that stutters, with flushes in between."""
    source = random.Random(5)
    stems = make_prompts(6, 3, 1200)

    def prompt() -> list[int]:
        stem = source.choice(stems)[: source.randrange(64, 1200)]
        return stem + [source.randrange(32, 127) for _ in range(source.randrange(1, 400))]

    for number in range(6):
        disk.write_at(source.choice([CRAWL, 3e6, 0]))
        prompts = [prompt() for _ in range(24)]
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda each: server.generate(each, num_new=2), prompts))
        if number % 2:
            disk.write_at(0)
            server.flush()
    disk.write_at(0)
    wait_until_clean(server)
    server.flush()
    state = server.tier_state()
    assert state["host_dirty_pages"] == 0
    again = prompt()
    assert server.generate(again).output_ids == server.generate(again).output_ids
    assert "Traceback" not in server.log


def test_release_and_weight_update_with_stores_waiting(
    server: Server, disk: Disk, model: Path
) -> None:
    """SGLang ended its scheduler, or kept the KV of the weights before in memory."""
    prompts = make_prompts(9, 12, LENGTH)
    update = {"model_path": str(model), "flush_cache": True}
    disk.write_at(0)
    server.flush()
    disk.write_at(CRAWL)
    expected = [answer.output_ids for answer in server.generate_all(prompts)]
    server.request("/release_memory_occupation", {"tags": ["kv_cache"]})
    server.request("/resume_memory_occupation", {"tags": ["kv_cache"]})
    answers = server.generate_all(prompts)
    assert [answer.output_ids for answer in answers] == expected
    server.request("/pause_generation", {"mode": "retract"})
    assert server.request("/update_weights_from_disk", update)["success"]
    server.request("/continue_generation", {"torch_empty_cache": False})
    answers = server.generate_all(prompts)
    assert [answer.output_ids for answer in answers] == expected
    assert all(answer.num_cached == 0 for answer in answers), "of the weights before"
    disk.write_at(0)
    wait_until_clean(server)
    server.flush()
    again = server.generate_all(prompts)
    assert [answer.output_ids for answer in again] == expected
    assert sum(answer.cached["storage"] for answer in again) > 0
    assert "Traceback" not in server.log
