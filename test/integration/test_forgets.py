"""A forgotten conversation is a hit nowhere: on the server that was asked, on one that shares its
index, on one that was down, under requests, and after ``kill -9``."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from conftest import PAGE, SMALL, Start, aligned, ask, make_prompts, residency, until
from server_process import Server, free_port

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH, NUM_NEW = 700, 8
WHOLE = LENGTH // PAGE * PAGE
GONE, CUT, KEPT, RUNS, MISSED = make_prompts(61, 5, LENGTH)


@pytest.fixture(scope="module")
def start_again(start: Start) -> Callable[[], list[Server]]:
    """Start two that follow each other, at the ports that they had."""
    ports = {name: free_port() for name in "ab"}
    peers = ",".join(f"127.0.0.1:{port}" for port in ports.values())
    own = {name: ("--tier-peer-port", str(port)) for name, port in ports.items()}
    return lambda: start("ab", *SMALL, "--tier-peers", peers, **own)


def held_here(server: Server, prompt: list[int]) -> list[int]:
    """What is known of another server may be of before the forget: it gives none of them."""
    here = residency(server, prompt)
    return [here[tier] for tier in ("device", "host", "nvme")]


def forget(server: Server, **body: Any) -> int:
    """Returns how many tokens."""
    code, report = ask(server, "/tier/forget", body)
    assert code == 200 and report["durable"], report
    return int(report["num_tokens"])


def found(server: Server, prompt: list[int], expected: list[int]) -> int:
    """Tokens of the prompt that were, and the answer is what it was."""
    answer = server.generate(prompt, len(expected))
    assert answer.output_ids == expected
    return answer.num_cached


def test_forgotten_conversation_is_a_hit_nowhere(start_again: Callable[[], list[Server]]) -> None:
    a, b = start_again()
    told = []
    for number, prompt in enumerate((GONE, CUT, KEPT, MISSED)):
        told.append(a.generate(prompt, NUM_NEW, rid=f"r{number}").output_ids)
        assert ask(a, "/tier/checkpoint", {"input_ids": prompt, "tier": "nvme"})[0] == 200
        until(lambda p=prompt: residency(b, p)["peer"] >= WHOLE, "not found at the other server")
        found(b, prompt, told[-1])
        until(lambda p=prompt: residency(b, p)["nvme"] >= aligned(LENGTH), "not kept by the other")

    assert forget(a, rid="r0") >= WHOLE
    assert forget(a, input_ids=CUT, keep_tokens=PAGE + 1) == WHOLE - 2 * PAGE
    for server in (a, b):
        assert held_here(server, GONE) == [0, 0, 0]
        cut = held_here(server, CUT)
        assert cut[-1] == max(cut) == 2 * PAGE, cut
    assert found(b, GONE, told[0]) == 0
    assert found(b, CUT, told[1]) == 2 * PAGE
    for server in (a, b):
        assert found(server, KEPT, told[2]) == aligned(LENGTH), "not to be forgotten"
    until(lambda: residency(b, GONE)["nvme"] >= aligned(LENGTH), "it is not stored again")

    # While a request of it runs. It may end before the answer, or after it.
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(a.generate, RUNS, 256, rid="runs")
        until(lambda: ask(a, "/tier/forget", {"rid": "runs"})[0] == 200, "never known")
        ran = running.result(120.0).output_ids
    assert held_here(a, RUNS) == [0, 0, 0]
    assert found(a, RUNS, ran) == 0

    # A server that is down hears of it when it is back, and one that is killed forgets for good.
    b.kill()
    assert forget(a, input_ids=MISSED) == WHOLE
    assert forget(a, input_ids=RUNS) == WHOLE
    a.kill()
    a, b = start_again()
    until(lambda: residency(b, MISSED)["nvme"] == 0, "it was down, and never heard")
    for server, prompt, expected in ((a, RUNS, ran), (b, MISSED, told[3])):
        assert held_here(server, prompt) == [0, 0, 0]
        assert found(server, prompt, expected) == 0
    assert found(b, KEPT, told[2]) == aligned(LENGTH)
