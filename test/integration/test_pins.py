"""A pinned conversation stays on NVMe, whatever else is stored and however the server ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from conftest import ALWAYS, SMALL_REGIONS, Launch, aligned, ask, make_prompts

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH = 700
MINE, OTHER = make_prompts(11, 2, LENGTH)
TOO_MANY = make_prompts(13, 5, 3000)
NVME_MIB = 48
CHURN = make_prompts(12, 16, 3000)


@pytest.fixture
def arguments(tmp_path: Path) -> tuple[str, ...]:
    return (
        *("--max-total-tokens", "4096", "--tier-host-bytes", "40MiB", *ALWAYS, *SMALL_REGIONS),
        *("--tier-nvme-bytes", f"{NVME_MIB}MiB", "--tier-dir", str(tmp_path / "kv")),
    )


def test_pinned_conversation_outlives_churn_and_kill(
    launch: Launch, arguments: tuple[str, ...]
) -> None:
    server = launch(*arguments)
    expected = server.generate(MINE).output_ids
    server.generate(OTHER)
    until = time.time() + 3600
    status, answer = ask(server, "/tier/pin", {"input_ids": MINE, "name": "mine", "ttl": 3600})
    assert (status, answer["num_tokens"]) == (200, aligned(LENGTH)), answer
    assert answer["pinned_until"] == pytest.approx(until, abs=60)
    assert ask(server, "/tier/checkpoint", {"input_ids": OTHER, "tier": "nvme"})[0] == 200

    written = server.tier_state()["nvme_bytes_written"]
    while server.tier_state()["nvme_bytes_written"] - written < 10 * NVME_MIB << 20:
        for prompt in CHURN:
            server.generate(prompt, num_new=1)
            prompt[0] += 1  # another prompt
    server.flush()
    server.kill()

    server = launch(*arguments)
    mine, other = server.generate(MINE), server.generate(OTHER)
    assert mine.output_ids == expected
    assert mine.cached["storage"] == aligned(LENGTH)
    assert other.cached["storage"] == 0, "nothing was reclaimed"

    ((listed,),) = [of["pins"] for of in ask(server, "/tier/pins")[1]]
    assert (listed["name"], listed["num_tokens"]) == ("mine", aligned(LENGTH))
    assert ask(server, "/tier/pins?extra_key=acme")[1][0]["pins"] == []
    assert ask(server, "/tier/unpin", {"name": "mine", "extra_key": "acme"})[0] == 404
    assert ask(server, "/tier/unpin", {"name": "mine"}) == (200, {"unpinned": True})
    assert ask(server, "/tier/unpin", {"name": "mine"})[0] == 404
    assert ask(server, "/tier/pins")[1][0]["pins"] == []


def test_pin_beyond_the_share_is_refused(launch: Launch, arguments: tuple[str, ...]) -> None:
    server = launch(*arguments)
    statuses = []
    for prompt in TOO_MANY:
        server.generate(prompt, num_new=1)
        assert ask(server, "/tier/checkpoint", {"input_ids": prompt, "tier": "nvme"})[0] == 200
        status, answer = ask(server, "/tier/pin", {"input_ids": prompt})
        statuses.append(status)
    assert statuses[0] == 200 and statuses[-1] == 409
    (listed,) = ask(server, "/tier/pins")[1]
    assert len(listed["pins"]) == statuses.count(200)
    bound = listed["bound_bytes"]
    assert sum(pin["bytes"] for pin in listed["pins"]) <= bound
    assert str(bound) in answer["error"]
    status, answer = ask(server, "/tier/pin", {"input_ids": [1, 2]})
    assert status == 400 and "shorter than a page" in answer["error"]
