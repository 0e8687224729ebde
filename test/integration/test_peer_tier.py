"""Servers that fetch pages from each other: what one computed another goes on with; a server that
hangs costs hits and nothing else; what is erased on one is gone on all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis_server import RedisServer

from conftest import ALWAYS, PAGE, SMALL, Start, aligned, ask, make_prompts, residency, until
from server_process import Server, free_ports
from sglang_tiered.wire.keys import PEER, make_keys

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTH, NUM_NEW = 700, 8
HANG_S = 5.0  # as long as a peer is given for an answer, ten times what computing takes
WHOLE = LENGTH // PAGE * PAGE
MOVED = make_prompts(41, 8, LENGTH)  # opened on A, continued on B
OWNED = make_prompts(42, 2, LENGTH)  # of a tenant
HUNG = make_prompts(46, 6, LENGTH)  # while A is stopped
COLD = make_prompts(45, 2, LENGTH)
GONE, CUT, KEPT, RUNS, MISSED = make_prompts(61, 5, LENGTH)
TENANT = {"extra_key": "acme", "cache_salt": "s3cret"}
PASSWORD = "not-a-secret"


@pytest.fixture(scope="module")
def start_pair(start: Start) -> Iterator[Callable[[], list[Server]]]:
    """They find each other in the Redis."""
    with RedisServer(password=PASSWORD) as redis:
        yield lambda: start("ab", *SMALL, environment={"SGLANG_TIERED_INDEX_URL": redis.url})


@pytest.fixture(scope="module")
def pair(start_pair: Callable[[], list[Server]]) -> list[Server]:
    return start_pair()


def held(server: Server, prompt: list[int], *more: str, **whose: str) -> list[int]:
    """Here. What is known of another server may be of before an erasure: it gives none of them."""
    report = residency(server, prompt, **whose)
    return [report[tier] for tier in ("device", "host", "nvme", *more)]


def wait_for_peers(server: Server, prompts: list[list[int]], **whose: str) -> None:
    for prompt in prompts:
        until(lambda p=prompt: residency(server, p, **whose)["peer"] >= WHOLE, "not found at peers")


def compute(server: Server, prompts: list[list[int]], **whose: str) -> list[list[int]]:
    """Cold, so that what comes back later is compared with what was computed."""
    answers = server.generate_all(prompts, concurrency=1, num_new=NUM_NEW, **whose)
    assert sum(answer.num_cached for answer in answers) == 0
    return [answer.output_ids for answer in answers]


def test_peer_serves_prefixes_computed_on_another_server(pair: list[Server]) -> None:
    a, b = pair
    opened = compute(a, MOVED)
    wait_for_peers(b, MOVED)
    assert held(b, MOVED[0], "peer") == [0, 0, 0, WHOLE]
    again = b.generate_all(MOVED, concurrency=2, num_new=NUM_NEW)
    assert [answer.output_ids for answer in again] == opened
    wanted = len(MOVED) * aligned(LENGTH)
    assert sum(answer.cached["storage"] for answer in again) >= 0.97 * wanted
    fetched = b.tier_state()["loaded_pages:peer"]
    assert fetched * PAGE >= 0.97 * wanted, "they came from elsewhere"
    assert a.tier_state()["copied_from_memory_pages"] > 0, "all were read from NVMe"
    # What was fetched is kept, and served again.
    for prompt in MOVED:
        until(lambda p=prompt: residency(b, p)["nvme"] >= aligned(LENGTH), "not kept")
        until(lambda p=prompt: residency(a, p)["peer"] >= aligned(LENGTH), "not told")
    for server in pair:
        assert PASSWORD not in json.dumps(server.request("/server_info")) + server.log


def test_a_server_that_hangs_never_stalls_the_scheduler(pair: list[Server]) -> None:
    """Stopped, so that its connections stay open and nothing answers."""
    a, b = pair
    expected = compute(a, HUNG)
    wait_for_peers(b, HUNG)
    parent = psutil.Process(a.process.pid)
    stopped = [parent, *parent.children(recursive=True)]
    try:
        for process in stopped:
            process.suspend()
        with ThreadPoolExecutor(len(HUNG)) as pool:
            waiting = [pool.submit(b.generate, prompt, NUM_NEW) for prompt in HUNG]
            # One after another: the first may come before the loads that wait for A.
            for prompt in make_prompts(4711, 3, LENGTH):
                begun = time.monotonic()
                b.generate(prompt, NUM_NEW)
                taken_s = time.monotonic() - begun
                assert taken_s < HANG_S, "a request that wants nothing of A waited for it"
            assert [future.result(60).output_ids for future in waiting] == expected
    finally:
        for process in stopped:
            process.resume()


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


def test_forgotten_conversation_is_a_hit_nowhere(
    pair: list[Server], start_pair: Callable[[], list[Server]]
) -> None:
    """On the server that was asked, on the other, on one that was down, under requests, and after
    ``kill -9``. The last of this pair."""
    a, b = pair
    told = []
    for number, prompt in enumerate((GONE, CUT, KEPT, MISSED)):
        told.append(a.generate(prompt, NUM_NEW, rid=f"r{number}").output_ids)
        assert ask(a, "/tier/checkpoint", {"input_ids": prompt, "tier": "nvme"})[0] == 200
        wait_for_peers(b, [prompt])
        found(b, prompt, told[-1])
        until(lambda p=prompt: residency(b, p)["nvme"] >= aligned(LENGTH), "not kept by the other")

    assert forget(a, rid="r0") >= WHOLE
    assert forget(a, input_ids=CUT, keep_tokens=PAGE + 1) == WHOLE - 2 * PAGE
    for server in (a, b):
        assert held(server, GONE) == [0, 0, 0]
        cut = held(server, CUT)
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
    assert held(a, RUNS) == [0, 0, 0]
    assert found(a, RUNS, ran) == 0

    # A server that is down hears of it when it is back, and one that is killed forgets for good.
    b.kill()
    assert forget(a, input_ids=MISSED) == WHOLE
    assert forget(a, input_ids=RUNS) == WHOLE
    a.kill()
    a, b = start_pair()
    until(lambda: residency(b, MISSED)["nvme"] == 0, "it was down, and never heard")
    for server, prompt, expected in ((a, RUNS, ran), (b, MISSED, told[3])):
        assert held(server, prompt) == [0, 0, 0]
        assert found(server, prompt, expected) == 0
    assert found(b, KEPT, told[2]) == aligned(LENGTH)


def test_each_rank_is_a_peer_and_all_purge(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks each, with keys; SGLang's checker ends a server whose ranks decide differently."""
    monkeypatch.setenv("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", "1")
    make_keys(tmp_path / "keys", (PEER,))
    ports = free_ports(2), free_ports(2)  # each rank has one
    a, b = start(
        "cd",
        *("--tp", "2", "--max-total-tokens", "4096", "--tier-host-bytes", "40MiB", *ALWAYS),
        *("--tier-peer-keys", str(tmp_path / "keys")),
        *("--tier-peers", ",".join(f"localhost:{port}" for port in ports)),
        c=("--tier-peer-port", str(ports[0])),
        d=("--tier-peer-port", str(ports[1])),
    )
    expected = {"moved": compute(a, MOVED), "owned": compute(a, OWNED, **TENANT)}
    (record,) = ask(a, "/tier/costs")[1]["ranks"]  # of the rank that requests come to
    assert record["keyed"] and record["always_loads"] and record["prefill"]["observed"] > 0
    wait_for_peers(b, MOVED)
    wait_for_peers(b, OWNED, **TENANT)
    assert residency(b, OWNED[0])["peer"] == 0, "another tenant's"
    answers = b.generate_all(MOVED, concurrency=4, num_new=NUM_NEW)
    assert [answer.output_ids for answer in answers] == expected["moved"]
    cached = sum(answer.cached["storage"] for answer in answers)
    assert cached >= 0.97 * aligned(LENGTH) * len(MOVED)
    # One of them is kept by B, the other is known to it.
    assert b.generate(OWNED[0], NUM_NEW, **TENANT).output_ids == expected["owned"][0]
    until(lambda: residency(a, OWNED[0], **TENANT)["peer"] >= aligned(LENGTH), "not told")
    with ThreadPoolExecutor(1) as pool:  # while B works
        busy = pool.submit(b.generate_all, COLD, concurrency=2, num_new=64)
        assert ask(a, "/tier/purge", TENANT)[1]["durable"]
        assert a.generate(OWNED[0], 1, **TENANT).num_cached == 0, "fetched from B, that just purged"
        until(lambda: not any(held(b, OWNED[1], "peer", **TENANT)), "B still holds it")
        busy.result(120)
    assert compute(b, OWNED[1:], **TENANT) == expected["owned"][1:]
    assert b.generate(OWNED[0], NUM_NEW, **TENANT).output_ids == expected["owned"][0]
    a.kill()
    again = b.generate_all(MOVED, concurrency=2, num_new=NUM_NEW)
    assert [answer.output_ids for answer in again] == expected["moved"]
    assert sum(answer.num_cached for answer in again) >= 0.9 * cached, "others' pages went too"
