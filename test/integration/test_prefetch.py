"""``/tier/prefetch``: a conversation comes up to host memory before its next request, or says why
it does not; and ``explain`` names the disk that made a request without one slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import ALWAYS, PAGE, Disk, Launch, aligned, ask, make_prompts
from kit.waiting import eventually
from server_process import Server
from sglang_tiered.integration.identity.tenants import tenant_digest

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(300)]

LENGTH = 960  # within what hints may load of this host tier, and more than a piece
PROMPT, OTHER = make_prompts(21, 2, LENGTH)
(SLOW,) = make_prompts(23, 1, LENGTH)
FLAGS = ("--max-total-tokens", "4096", "--tier-host-bytes", "26MiB", *ALWAYS)
WAIT_S = 60.0
DIGEST = tenant_digest("acme", "s3cret").hex()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server writes a line for each request."""
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def server(
    launch: Launch, disk: Disk, log: Path, tmp_path_factory: pytest.TempPathFactory
) -> Server:
    directory = tmp_path_factory.mktemp("tier") / "kv"
    return launch(*FLAGS, "--tier-dir", str(directory), "--tier-log-requests", str(log))


def make_cold(server: Server, prompt: list[int], **tenant: str) -> list[int]:
    """Have a prompt on NVMe alone; return what follows it."""
    expected = server.generate(prompt, **tenant).output_ids
    body = {"input_ids": prompt, "tier": "nvme", **tenant}
    eventually(lambda: ask(server, "/tier/checkpoint", body)[0] == 200, timeout_s=WAIT_S)
    server.flush()
    return list(expected)


def test_hinted_conversation_is_hit_in_host_memory(server: Server) -> None:
    tenant = {"extra_key": "acme", "cache_salt": "s3cret"}
    expected = make_cold(server, PROMPT, **tenant)
    assert ask(server, "/tier/prefetch", {"input_ids": PROMPT})[1]["num_loading"] == 0, (
        "another tenant's"
    )
    whole = {"num_tokens": LENGTH, "num_in_memory": LENGTH, "num_loading": 0}
    hint = {"input_ids": PROMPT, "wait_s": 30, **tenant}
    assert ask(server, "/tier/prefetch", hint) == (200, whole)
    assert ask(server, "/tier/residency", {"input_ids": PROMPT, **tenant})[1]["host"] == LENGTH
    answer = server.generate(PROMPT, **tenant)
    assert answer.output_ids == expected
    (counted,) = ask(server, "/tier/tenants")[1]
    assert {row["num_pages"] for row in counted if row["tenant"] == DIGEST} == {LENGTH // PAGE}
    assert "s3cret" not in json.dumps(counted)
    assert (answer.cached["host"], answer.cached["storage"]) == (aligned(LENGTH), 0)
    assert server.tier_state()["hints_ended:loaded"] == 1


def explain(*arguments: object) -> str:
    command = [sys.executable, "-m", "sglang_tiered", "explain", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_explain_names_the_slow_disk(server: Server, disk: Disk, log: Path) -> None:
    expected = make_cold(server, SLOW)
    with disk.slow(1.5):
        answer = server.generate(SLOW)
    assert (answer.output_ids, answer.cached["storage"]) == (expected, aligned(LENGTH))
    server.generate(OTHER)

    def last_loaded() -> Any:
        """The last but one request; its line is written on a thread."""
        found = json.loads(explain(log, "--json", "--slower-than", "0.000001"))["requests"]
        by_arrival = sorted(found, key=lambda one: one["record"]["arrived_unix_s"])
        slow = by_arrival[-2]["record"]
        return by_arrival[-2] if slow["tokens"].get("num_nvme") == aligned(LENGTH) else None

    eventually(last_loaded, timeout_s=WAIT_S)
    slow = last_loaded()
    assert " s: read " in slow["cause"] and " from nvme at " in slow["cause"], slow
    (wait,) = [part for part in slow["parts"] if part["name"] == "load"]
    (tier,) = slow["record"]["load"]["tiers"]
    assert wait["seconds"] > 1.5 and tier["read_s"] > 1.5 and tier["num_bytes"] > 0
    assert "waiting for its load" in explain(log, "--rid", slow["rid"])
    assert server.tier_state().get("request_log_dropped", 0) == 0
