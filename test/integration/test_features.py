"""Features of SGLang that people rely on, above the tiers: every answer is what a server without
tiers says, and what comes again comes from the tiers. One server has them all."""

from __future__ import annotations

import urllib.error
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from conftest import ALWAYS, Disk, Launch, aligned, make_prompts, until
from server_process import Server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTH, NUM_NEW, MAX_RUNNING = 700, 8, 8
PROMPTS = make_prompts(41, 20, LENGTH)  # more than device and host memory hold
FLAGS = (
    *("--max-total-tokens", "3072", "--tier-host-bytes", "36MiB", *ALWAYS),
    *("--max-running-requests", f"{MAX_RUNNING}", "--radix-eviction-policy", "priority"),
    "--enable-priority-scheduling",
    # More requests run than device memory can hold until their ends.
    *("--priority-scheduling-preemption-threshold", "1", "--schedule-conservativeness", "0.1"),
)
LOW, MIDDLE, HIGH = 0, 5, 9


@pytest.fixture(scope="module")
def server(launch: Launch, disk: Disk, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return launch(*FLAGS, "--tier-dir", str(tmp_path_factory.mktemp("tier") / "kv"))


@pytest.fixture(scope="module")
def expected(stock: Server) -> list[list[int]]:
    return answers_of(stock, PROMPTS)


def answers_of(server: Server, prompts: list[list[int]], num_new: int = NUM_NEW) -> list[list[int]]:
    answers = server.generate_all(prompts, concurrency=MAX_RUNNING, num_new=num_new)
    return [answer.output_ids for answer in answers]


def load_of(server: Server) -> dict[str, Any]:
    """What the scheduler has to do."""
    load: dict[str, Any] = server.request("/v1/loads?include=core")["loads"][0]
    return load


def is_idle(server: Server) -> bool:
    load, state = load_of(server), server.tier_state()
    busy = load["num_running_reqs"] + load["num_waiting_reqs"] + state["tier_inflight_jobs:nvme"]
    return not busy


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


def test_lookup_hit_evicted_before_its_request_runs(
    server: Server, stock: Server, expected: list[list[int]]
) -> None:
    waiting = make_prompts(48, 3, LENGTH)
    wanted = answers_of(stock, waiting)
    assert answers_of(server, waiting) == wanted
    blocking = make_prompts(49, MAX_RUNNING, 65)
    with ThreadPoolExecutor(MAX_RUNNING + len(waiting) + len(PROMPTS)) as pool:
        blocked = [pool.submit(server.generate, each, 250, priority=HIGH) for each in blocking]
        until(lambda: load_of(server)["num_running_reqs"] == MAX_RUNNING)
        late = [pool.submit(server.generate, each, priority=LOW) for each in waiting]
        until(lambda: load_of(server)["num_waiting_reqs"] == len(late))
        # They go first, and through all of device and host memory.
        passing = [pool.submit(server.generate, each, priority=MIDDLE) for each in PROMPTS]
        until(lambda: load_of(server)["num_waiting_reqs"] > len(late))
        assert not any(each.done() for each in blocked)
        assert [each.result().output_ids for each in passing] == expected
        answers = [each.result() for each in late]
    assert [answer.output_ids for answer in answers] == wanted
    assert sum(answer.cached["storage"] for answer in answers) > 0


MANY = 120
SHORT = make_prompts(46, MANY, 70)  # a page each


def test_requests_aborted_during_loads_leak_no_memory(
    server: Server, disk: Disk, expected: list[list[int]]
) -> None:
    """Three times what host memory gives to loads is aborted, and all of it is there again: what
    more than fills host memory goes through it, and none is copied too late. An idle SGLang ends
    itself when device memory leaks, and counts what is locked there as used."""
    num_stored = server.tier_state()["tier_pages:nvme"]
    many = answers_of(server, SHORT)
    server.wait_for_state("tier_pages:nvme", num_stored + MANY)

    def aborted(asked: Any) -> bool:
        try:
            return len(asked.result().output_ids) < NUM_NEW
        except urllib.error.HTTPError:
            return True

    for _ in range(3):
        server.flush()
        with ThreadPoolExecutor(MANY) as pool:
            with disk.slow(3.0):
                asked = [pool.submit(server.generate, prompt) for prompt in SHORT]
                until(lambda: load_of(server)["num_waiting_reqs"] >= MANY - 1)
                assert server.tier_state()["tier_inflight_jobs:nvme"] > 0
                server.request("/abort_request", {"rid": "", "abort_all": True})
                until(lambda: load_of(server)["num_waiting_reqs"] == 0)
            assert sum(aborted(each) for each in asked) >= 100
        until(lambda: is_idle(server) and not load_of(server)["num_used_tokens"])
    skipped = server.tier_state()["host_backups_skipped"]
    for prompts, wanted in ((SHORT, many), (PROMPTS, expected)):
        answers = server.generate_all(prompts, concurrency=MANY if prompts is SHORT else 4)
        assert [answer.output_ids for answer in answers] == wanted
        most = aligned(len(prompts[0])) * len(prompts)
        assert sum(answer.num_cached for answer in answers) >= 0.97 * most
    assert server.tier_state()["host_backups_skipped"] == skipped
