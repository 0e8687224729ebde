"""A disk slower than what is computed, with pages of eight bits a number: nothing fails, and a
weight update finds none of the pages before it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import SMALL, Disk, Launch, aligned, make_prompts, outputs, until
from kit.small_model import write_small_model
from server_process import Server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTH = 700
CRAWL = 300e3  # bytes per second: seconds for the pages of a few prompts


@pytest.fixture(scope="module")
def server(launch: Launch, disk: Disk, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """It computes otherwise than the others, so it is compared with itself."""
    directory = str(tmp_path_factory.mktemp("tier") / "kv")
    return launch(*SMALL, "--tier-dir", directory, "--kv-cache-dtype", "fp8_e4m3")


def settle(server: Server, disk: Disk) -> None:
    """No store waits for the disk, and memory is empty."""
    disk.order()

    def is_clean() -> bool:
        state = server.tier_state()
        return not state["spill_waiting_tokens"] and not state["spill_inflight_tokens"]

    until(is_clean, "stores still wait", 60.0)
    server.flush()


def test_splitting_and_evicting_waiting_nodes_breaks_nothing(server: Server, disk: Disk) -> None:
    """Random chains over few stems, on a disk that stutters, with flushes in between."""
    source = random.Random(5)
    stems = make_prompts(6, 3, 1200)

    def prompt() -> list[int]:
        stem = source.choice(stems)[: source.randrange(64, 1200)]
        return stem + [source.randrange(32, 127) for _ in range(source.randrange(1, 400))]

    for number in range(6):
        disk.order(write_bytes_s=source.choice([CRAWL, 3e6, 0]))
        prompts = [prompt() for _ in range(24)]
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda each: server.generate(each, num_new=2), prompts))
        if number % 2:
            disk.order()
            server.flush()
    settle(server, disk)
    assert server.tier_state()["host_dirty_pages"] == 0
    assert "Traceback" not in server.log


def test_release_and_weight_update_with_stores_waiting(
    server: Server, disk: Disk, model: Path, tmp_path: Path
) -> None:
    """SGLang ended its scheduler, or kept the KV of the weights before in memory."""
    prompts = make_prompts(9, 12, LENGTH)
    disk.order(write_bytes_s=CRAWL)
    expected = outputs(server.generate_all(prompts))
    server.request("/release_memory_occupation", {"tags": ["kv_cache"]})
    server.request("/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert outputs(server.generate_all(prompts)) == expected
    other = write_small_model(tmp_path / "other", seed=1)
    for weights in (other, model):
        disk.order(write_bytes_s=CRAWL)
        server.request("/pause_generation", {"mode": "retract"})
        update = {"model_path": str(weights), "flush_cache": True}
        assert server.request("/update_weights_from_disk", update)["success"]
        server.request("/continue_generation", {"torch_empty_cache": False})
        answers = server.generate_all(prompts)
        assert (outputs(answers) == expected) == (weights == model)
        if weights == other:
            assert not any(answer.num_cached for answer in answers), "of the weights before"
        settle(server, disk)
        again = server.generate_all(prompts)
        assert outputs(again) == outputs(answers)
        assert sum(answer.cached["storage"] for answer in again) >= 0.5 * 12 * aligned(LENGTH)
    assert "Traceback" not in server.log
