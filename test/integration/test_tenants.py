"""Tenants on a live server: separate, counted, capped, and purged in every tier."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import SMALL, SMALL_REGIONS, Launch, aligned, make_prompts
from kit.waiting import eventually
from server_process import Server
from sglang_tiered.integration.identity.tenants import tenant_digest

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
