"""``GET /tier/costs`` of a live server: true, protected, and answered while the scheduler hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from conftest import PAGE, Launch, aligned, make_prompts
from kit.waiting import eventually
from sglang_tiered.policy.server_costs import RankCosts, ServerCosts, parse_server_costs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from server_process import Server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_PROMPTS, LENGTH = 3, 1500
PROMPTS = make_prompts(101, NUM_PROMPTS, LENGTH)
LONG = make_prompts(102, 5, 3500)  # more behind the first than a batch takes
KEY = "admin-of-the-test"
ANSWER_S = 2.0
"""Many times what an answer takes, less than any of the hangs here."""


@pytest.fixture(scope="module")
def server(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("tier") / "kv"
    with pytest.MonkeyPatch.context() as patch:
        opener = urllib.request.build_opener()
        opener.addheaders = [("Authorization", f"Bearer {KEY}")]
        patch.setattr(urllib.request, "_opener", opener)  # for whatever asks below
        yield launch(
            *("--max-total-tokens", "16384", "--tier-host-bytes", "96MiB"),
            *("--tier-dir", str(directory), "--admin-api-key", KEY),
        )


def status(server: Server, path: str, key: str | None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(server.url + path, headers=headers)
    try:
        with urllib.request.build_opener().open(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def costs(server: Server) -> ServerCosts:
    request = urllib.request.Request(
        server.url + "/tier/costs", headers={"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        assert response.headers["Content-Type"] == "application/json"
        return parse_server_costs(response.read())


def rank(server: Server) -> RankCosts:
    (record,) = costs(server).ranks
    return record


def schedulers(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "scheduler" in " ".join(child.cmdline())]


def test_costs_have_the_key_of_other_tier_endpoints(server: Server) -> None:
    for path in ("/tier/costs", "/tier/tenants"):
        assert [status(server, path, key) for key in (None, "wrong", KEY)] == [401, 401, 200]


def test_routers_plan_is_what_the_server_does(server: Server) -> None:
    for prompt in PROMPTS:
        server.generate(prompt)
    server.wait_for_state("tier_pages:nvme", NUM_PROMPTS * (LENGTH // PAGE))
    learnt = rank(server)
    assert learnt.prefill.observed >= NUM_PROMPTS
    assert learnt.tiers["nvme"].healthy and learnt.tiers["nvme"].held_bytes
    for prompt in PROMPTS:
        server.flush()
        held = server.request("/tier/residency", {"input_ids": prompt[:-1]})["nvme"]
        assert held == aligned(LENGTH)
        record = rank(server)
        plan = record.cost_model().plan(
            num_held=held, num_new=LENGTH, num_before=0, ahead=record.ahead_tokens
        )
        before = server.tier_state()
        server.generate(prompt)
        after = server.tier_state()
        loaded, declined = (
            after[f"load_decision_tokens:{name}"] - before[f"load_decision_tokens:{name}"]
            for name in ("load", "declined")
        )
        assert (loaded, declined) == (plan.num_tokens, held - plan.num_tokens)
    assert rank(server).boot == learnt.boot


def test_server_info_and_gauges_tell_the_same(server: Server) -> None:
    state, record = server.tier_state(), rank(server)
    told = state["costs"]
    assert tuple(told["prefill"]["prices"]) == record.prefill.prices  # type: ignore[index]
    assert state["prefill_price_seconds:token"] == record.prefill.prices[1]
    assert state["expected_queue_wait_seconds"] == record.queue_wait_s == 0


def test_idle_server_has_a_young_record_without_work(server: Server) -> None:
    server.generate(PROMPTS[0][:100], num_new=1)
    eventually(lambda: rank(server).waiting.requests == rank(server).decode.requests == 0)
    deadline = time.monotonic() + 2.5  # the scheduler sleeps for a second at a time
    while time.monotonic() < deadline:
        assert rank(server).age_s < 2.0
    assert rank(server).wait_s() == 0.0


def test_prefill_under_way_is_told(server: Server) -> None:
    server.flush()
    seen: list[RankCosts] = []
    first, *others = [threading.Thread(target=server.generate, args=(prompt,)) for prompt in LONG]
    deadline = time.monotonic() + 60.0

    def look_until(condition: Callable[[], bool]) -> None:
        while not condition():
            assert time.monotonic() < deadline
            seen.append(rank(server))

    first.start()
    # Of those that arrive together a batch takes what fits, and a record may be older than it.
    look_until(lambda: bool(seen) and seen[-1].running_prefill_s > 0.0 or not first.is_alive())
    for asker in others:
        asker.start()
    look_until(lambda: not any(asker.is_alive() for asker in (first, *others)))
    assert max(record.running_prefill_s for record in seen) > 0.1
    assert max(record.queue_wait_s for record in seen) > 0.1
    assert max(record.waiting.tokens for record in seen) > len(LONG[0]) / 2
    assert max(record.busy for record in seen) > 0.05
    eventually(lambda: rank(server).wait_s() == 0.0)


def test_hung_scheduler_is_answered_for_with_its_age(server: Server) -> None:
    (scheduler,) = schedulers(server)
    os.kill(scheduler.pid, signal.SIGSTOP)
    try:
        first = rank(server)
        eventually(lambda: rank(server).age_s > first.age_s + 1.5)
        assert rank(server).at == first.at
    finally:
        os.kill(scheduler.pid, signal.SIGCONT)
    eventually(lambda: rank(server).at > first.at and rank(server).age_s < 2.0)


def test_records_lie_in_memory_without_a_name(server: Server) -> None:
    """So nothing is left of it when the server is killed."""
    (scheduler,) = schedulers(server)
    maps = Path(f"/proc/{scheduler.pid}/maps").read_text()
    assert "/memfd:sglang-tiered-costs (deleted)" in maps
