"""Tenants on a live server: separate, counted, capped, and purged in every tier."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from conftest import ALWAYS, SMALL, SMALL_REGIONS, Launch, aligned, make_prompts
from kit.waiting import eventually
from sglang_tiered.integration.identity.tenants import tenant_digest

if TYPE_CHECKING:
    from pathlib import Path

    from server_process import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

NUM_PROMPTS, LENGTH = 6, 700
PAGES = aligned(LENGTH) // 64 * NUM_PROMPTS
PROMPTS = make_prompts(5, NUM_PROMPTS, LENGTH)
TENANT = {"extra_key": "acme", "cache_salt": "s3cret"}
OTHER = {"extra_key": "other", "cache_salt": "s3cret"}
DIGEST = tenant_digest("acme", "s3cret").hex()
OTHERS = tenant_digest("other", "s3cret").hex()


def cached(server: Server, tenant: dict[str, str]) -> int:
    answers = server.generate_all(PROMPTS, **tenant)
    return sum(sum(answer.cached.values()) for answer in answers)


def stored(server: Server) -> dict[str, int]:
    return {entry["tenant"]: entry["num_pages"] for entry in server.request("/tier/tenants")[0]}


def wait_until_stored(server: Server, *digests: str) -> None:
    """All pages of these tenants: those of others, and of answers, are stored meanwhile too."""
    eventually(lambda: all(stored(server).get(digest, 0) >= PAGES for digest in digests), "stored")


def status(server: Server, path: str, body: Any) -> int:
    headers = {"Content-Type": "application/json"}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def purge(server: Server, whom: dict[str, Any]) -> None:
    """Until memory is empty too. What is asked sooner is kept apart from what is stored, and goes
    with the flush that comes once the server is idle."""
    deadline = time.monotonic() + 60.0
    while True:
        report = server.request("/tier/purge", whom)
        assert report["durable"] is True
        if report["in_memory"] == "gone":
            return
        assert time.monotonic() < deadline, report


@pytest.fixture(scope="module")
def tier_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier") / "kv"


@pytest.fixture(scope="module")
def server(launch: Launch, tier_dir: Path) -> Server:
    server = launch(*SMALL, *SMALL_REGIONS, "--tier-dir", str(tier_dir))
    for tenant in (TENANT, OTHER):
        assert cached(server, tenant) == 0, "a tenant hit another's pages"
    wait_until_stored(server, DIGEST, OTHERS)
    return server


@pytest.mark.slow
class TestLife:
    """One store, in this order."""

    def test_pages_are_counted_under_their_tenants(self, server: Server) -> None:
        counted = stored(server)
        assert min(counted[DIGEST], counted[OTHERS]) >= PAGES
        assert server.tier_state()["tier_tenants:nvme"] >= 2
        assert "s3cret" not in json.dumps(server.request("/tier/tenants"))

    def test_sglangs_clear_empties_memory_and_purges_nothing(self, server: Server) -> None:
        wait_until_stored(server, DIGEST, OTHERS)
        assert status(server, "/hicache/storage-backend/clear", b"") == 200
        state = server.tier_state()
        assert state["tier_pages:nvme"] >= 2 * PAGES
        assert state["purged_pages:nvme"] == 0
        answer = server.generate(PROMPTS[0], **OTHER)
        assert answer.cached["device"] == answer.cached["host"] == 0
        assert answer.cached["storage"] == aligned(LENGTH)

    @pytest.mark.parametrize(
        "body", [{}, [], {"all": False}, {"all": True, "extra_key": "x"}, {"extra_key": ""}, b"{"]
    )
    def test_a_purge_of_nothing_clear_is_refused(self, server: Server, body: Any) -> None:
        before = stored(server)
        assert status(server, "/tier/purge", body) == 400
        after = stored(server)
        assert all(after[tenant] >= num_pages for tenant, num_pages in before.items())

    def test_long_names_leave_no_memory_taken(self, server: Server) -> None:
        """One client could take all of it, on every rank."""
        (scheduler,) = (
            child
            for child in psutil.Process(server.process.pid).children(recursive=True)
            if "scheduler" in child.name() or "scheduler" in " ".join(child.cmdline())
        )

        def ask_with_long_names(start: int, number: int) -> int:
            for n in range(start, start + number):
                names = {name: f"{name}{n}".ljust(3 << 20, "x") for name in (*TENANT, "rid")}
                assert server.generate(PROMPTS[0][:200], num_new=1, **names).output_ids
            return int(scheduler.memory_info().rss)

        before = ask_with_long_names(0, 8)
        after = ask_with_long_names(8, 16)
        assert after - before < 16 << 20
        long = {name: f"{name}23".ljust(3 << 20, "x") for name in TENANT}
        again = server.generate(PROMPTS[0][:200], num_new=1, **long)
        assert sum(again.cached.values()) == 192, "its tenant keeps its pages"
        purge(server, long)
        again = server.generate(PROMPTS[0][:200], num_new=1, **long)
        assert sum(again.cached.values()) == 0

    def test_purge_removes_one_tenant_from_every_tier(self, server: Server) -> None:
        purge(server, TENANT)
        assert stored(server).get(DIGEST, 0) == 0  # its dead pages may still take space
        assert cached(server, TENANT) == 0
        assert cached(server, OTHER) >= 0.97 * aligned(LENGTH) * NUM_PROMPTS
        assert server.tier_state()["purged_pages:nvme"] >= PAGES

    def test_purge_holds_while_the_tenants_requests_run(self, server: Server) -> None:
        wait_until_stored(server, DIGEST, OTHERS)
        body = PROMPTS[0]
        running = threading.Thread(
            target=lambda: server.generate(body, num_new=400, **TENANT), daemon=True
        )
        running.start()
        reports = [server.request("/tier/purge", TENANT) for _ in range(3)]
        assert all(report["durable"] for report in reports)
        first = server.generate(PROMPTS[1], **TENANT)
        assert sum(first.cached.values()) == 0, "a copy in memory was found after the purge"
        running.join(120)
        assert not running.is_alive()
        purge(server, TENANT)
        assert stored(server).get(DIGEST, 0) == 0  # its dead pages may still take space

    @pytest.mark.slow
    def test_a_purge_outlives_kill_and_restart(
        self, launch: Launch, server: Server, tier_dir: Path
    ) -> None:
        assert cached(server, TENANT) == 0
        wait_until_stored(server, DIGEST, OTHERS)
        assert server.request("/tier/purge", TENANT)["durable"]
        server.kill()
        again = launch(
            *SMALL,
            *SMALL_REGIONS,
            "--tier-dir",
            str(tier_dir),
        )
        assert stored(again).get(DIGEST, 0) == 0
        assert cached(again, TENANT) == 0
        assert cached(again, OTHER) >= 0.97 * aligned(LENGTH) * NUM_PROMPTS
        again.kill()


@pytest.mark.slow
def test_a_share_and_a_purge_of_everything(launch: Launch, tmp_path: Path) -> None:
    server = launch(
        *SMALL, "--tier-dir", str(tmp_path / "kv"), "--tier-nvme-bytes", "64MiB",
        "--tier-tenant-share", "25%", *SMALL_REGIONS,
    )  # fmt: skip
    prompts = make_prompts(9, 40, LENGTH)
    server.generate_all(prompts, **TENANT)
    server.generate_all(PROMPTS, **OTHER)
    server.wait_for_state("tier_pages:nvme", PAGES)
    taken = {e["tenant"]: e["physical_bytes"] for e in server.request("/tier/tenants")[0]}
    assert 0 < taken[DIGEST] <= 16 << 20
    assert server.request("/tier/purge", {"all": True})["durable"]
    assert server.tier_state()["tier_pages:nvme"] == 0
    assert cached(server, OTHER) == 0
    server.kill()


def test_a_busy_server_serves_tiers_after_purges(launch: Launch, tmp_path: Path) -> None:
    """Requests run all the time, and more prompts come back than memory holds."""
    memory = ("--max-total-tokens", "4096", "--tier-host-bytes", "18MiB", *ALWAYS)
    server = launch(*memory, *SMALL_REGIONS, "--tier-dir", str(tmp_path / "kv"))
    prompts = make_prompts(9, 22, LENGTH)  # half as much again as device and host memory hold
    ends, is_over = [], threading.Event()

    def never_stop(number: int) -> None:
        while not is_over.is_set():
            server.generate(make_prompts(100 + number, 1, 80)[0], num_new=300)
            ends.append(number)

    busy = [threading.Thread(target=never_stop, args=(number,)) for number in range(2)]
    for thread in busy:
        thread.start()
    try:
        before = cached_after_storing(server, prompts)
        assert server.request("/tier/purge", {"all": True})["durable"]
        assert server.tier_state()["tier_pages:nvme"] < len(prompts)
        after = cached_after_storing(server, prompts)
        assert server.request("/tier/purge", TENANT)["in_memory"] == "hidden", "it was idle"
        print(f"cached tokens before {before}, after {after}, of {len(prompts) * aligned(LENGTH)}")
        assert before > 0.5 * len(prompts) * aligned(LENGTH)
        assert after > 0.9 * before
    finally:
        is_over.set()
        for thread in busy:
            thread.join(300)
    assert ends
    server.kill()


def cached_after_storing(server: Server, prompts: list[list[int]]) -> int:
    """Ask twice; returns the tokens that were found the second time."""
    server.generate_all(prompts, **OTHER)
    pages = aligned(LENGTH) // 64 * len(prompts)
    server.wait_for_state("tier_pages:nvme", 0.9 * pages)
    return sum(sum(each.cached.values()) for each in server.generate_all(prompts, **OTHER))
