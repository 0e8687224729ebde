"""A pinned conversation stays on NVMe, whatever else is stored and however the server ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from conftest import ALWAYS, SMALL_REGIONS, Launch, aligned, ask, make_prompts
from server_process import Server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH = 700
MINE, OTHER = make_prompts(11, 2, LENGTH)
NVME_MIB = 48
CHURN = make_prompts(12, 16, 1500)


def listed(server: Server, query: str = "") -> list[dict[str, Any]]:
    status, answer = ask(server, f"/tier/conversations{query}")
    assert status == 200, answer
    rows: list[dict[str, Any]] = answer["conversations"]
    return rows


def test_pinned_conversation_outlives_churn_and_kill(launch: Launch, tmp_path: Path) -> None:
    arguments = (
        *("--max-total-tokens", "4096", "--tier-host-bytes", "40MiB", *ALWAYS, *SMALL_REGIONS),
        *("--tier-nvme-bytes", f"{NVME_MIB}MiB", "--tier-dir", str(tmp_path / "kv")),
    )
    server = launch(*arguments)
    expected = server.generate(MINE, conversation_id="chat").output_ids
    server.generate(OTHER, rid="other", extra_key="acme")  # without an id
    mine, theirs = listed(server), listed(server, "?extra_key=acme")
    assert [(row["id"], row["num_tokens"] >= LENGTH) for row in mine] == [("chat", True)]
    assert [(row["id"], row["rid"]) for row in theirs] == [(None, "other")]
    until = time.time() + 3600
    selector = {"conversation_id": "chat"}
    assert ask(server, "/tier/pin", {**selector, "extra_key": "acme"})[0] == 404
    status, answer = ask(server, "/tier/pin", {**selector, "name": "mine", "ttl": 3600})
    assert (status, answer["num_tokens"] >= aligned(LENGTH)) == (200, True), answer

    written, churned = server.tier_state()["written_bytes:nvme"], []
    while server.tier_state()["written_bytes:nvme"] - written < 10 * NVME_MIB << 20:
        for prompt in CHURN:
            churned.append(prompt.copy())
            server.generate(prompt, num_new=1)
            prompt[0] += 1  # another prompt
    server.flush()
    server.kill()

    server = launch(*arguments)
    status, answer = ask(server, "/tier/residency", selector)
    assert (status, answer["nvme"]) == (200, aligned(answer["num_tokens"] + 1)), answer
    (row,) = listed(server)
    assert (row["id"], row["nvme"], row["last_used"]) == ("chat", answer["nvme"], None)
    (pinned,) = row["pins"]
    assert (pinned["name"], pinned["tier"]) == ("mine", "nvme")
    assert pinned["pinned_until"] == pytest.approx(until, abs=60)
    again = server.generate(MINE)
    assert again.output_ids == expected
    assert again.cached["storage"] == aligned(LENGTH)

    assert ask(server, "/tier/unpin", {"name": "mine", "extra_key": "acme"})[0] == 404
    assert ask(server, "/tier/unpin", {"conversation_id": "chat", "cache_salt": "s"})[0] == 404
    assert ask(server, "/tier/unpin", {"conversation_id": "chat"}) == (200, {"unpinned": True})
    assert [(row["id"], row["pins"]) for row in listed(server)] == [(None, [])]
    gone = server.generate(churned[len(churned) // 2])
    assert gone.cached["storage"] == 0, "nothing was reclaimed"
