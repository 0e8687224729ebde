"""Requests that lose their memory: every answer is what a server without tiers says, and what comes
again comes from the tiers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from conftest import ALWAYS, Launch, aligned, make_prompts, until
from server_process import Server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

MAX_RUNNING = 8
FLAGS = (
    *("--max-total-tokens", "3072", "--tier-host-bytes", "36MiB", *ALWAYS),
    *("--max-running-requests", f"{MAX_RUNNING}", "--radix-eviction-policy", "priority"),
    "--enable-priority-scheduling",
    # More requests run than device memory can hold until their ends.
    *("--priority-scheduling-preemption-threshold", "1", "--schedule-conservativeness", "0.1"),
)
LOW, HIGH = 0, 9


@pytest.fixture(scope="module")
def server(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return launch(*FLAGS, "--tier-dir", str(tmp_path_factory.mktemp("tier") / "kv"))


def answers_of(server: Server, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    answers = server.generate_all(prompts, concurrency=MAX_RUNNING, num_new=num_new)
    return [answer.output_ids for answer in answers]


def load_of(server: Server) -> dict[str, Any]:
    """What the scheduler has to do."""
    load: dict[str, Any] = server.request("/v1/loads?include=core")["loads"][0]
    return load


def is_idle(server: Server) -> bool:
    load, state = load_of(server), server.tier_state()
    busy = load["num_running_reqs"] + load["num_waiting_reqs"] + state["tier_inflight_jobs:nvme"]
    return not busy and not load["num_used_tokens"]


@pytest.mark.parametrize(
    ("num_new", "num_running", "memory_is_short"),
    [
        # As many as may, with memory for all of them: a higher priority takes the place of one.
        pytest.param(150, MAX_RUNNING, False, id="preempted"),
        # More than memory can hold to their ends.
        pytest.param(300, MAX_RUNNING - 1, True, id="retracted"),
    ],
)
def test_retracted_requests_give_the_same_answers(
    server: Server, stock: Server, num_new: int, num_running: int, memory_is_short: bool
) -> None:
    """In the second round their prompts come from NVMe, and come back meanwhile."""
    length = 100
    low, high = make_prompts(44, MAX_RUNNING, length), make_prompts(45, MAX_RUNNING // 2, length)
    wanted = [*answers_of(stock, low, num_new), *answers_of(stock, high, num_new)]

    def ask(prompt: list[int], priority: int) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "priority": priority}
        answer: dict[str, Any] = server.request("/generate", body)
        return answer

    num_told, num_retractions = server.log.count("Retract requests"), 0
    with ThreadPoolExecutor(len(wanted)) as pool:
        for number in range(2):
            server.flush()
            num_loaded = server.tier_state()["loaded_pages:nvme"]
            asked = [pool.submit(ask, prompt, LOW) for prompt in low]
            until(lambda: load_of(server)["num_running_reqs"] >= num_running)
            asked += [pool.submit(ask, prompt, HIGH) for prompt in high]
            answers = [future.result() for future in asked]
            assert [answer["output_ids"] for answer in answers] == wanted
            num_retractions += sum(answer["meta_info"]["num_retractions"] for answer in answers)
            until(lambda: is_idle(server))
            loaded = server.tier_state()["loaded_pages:nvme"] - num_loaded
            assert number == 0 or loaded >= len(wanted) * aligned(length) // 64
    assert num_retractions > 0
    assert (server.log.count("Retract requests") > num_told) == memory_is_short
