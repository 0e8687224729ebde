"""Loading is measured against computing in the running server, and never waited for in vain."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conftest import Launch, aligned, make_prompts

if TYPE_CHECKING:
    from server_process import Answer, Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

NUM_PROMPTS, LENGTH = 8, 1500
PROMPTS = make_prompts(7, NUM_PROMPTS, LENGTH)
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Path:
    return demo_model


@pytest.fixture(scope="module")
def slowness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seconds that each read of the tier takes longer, as text."""
    return tmp_path_factory.mktemp("disk") / "slowness"


@pytest.fixture(scope="module")
def server(launch: Launch, tmp_path_factory: pytest.TempPathFactory, slowness: Path) -> Server:
    folder = str(Path(__file__).parent / "slow_disk")
    with pytest.MonkeyPatch.context() as patch:
        paths = [*filter(None, [os.environ.get("PYTHONPATH")]), folder]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("SLOW_DISK_FILE", str(slowness))
        return launch(
            *("--max-total-tokens", "4096", "--tier-host-bytes", "64MiB"),
            *("--tier-dir", str(tmp_path_factory.mktemp("tier") / "kv")),
        )


@pytest.fixture(scope="module")
def expected(server: Server) -> list[list[int]]:
    answers = [server.generate(prompt) for prompt in PROMPTS]
    server.wait_for_state("tier_pages:nvme", NUM_PROMPTS * (LENGTH // 64))
    return [answer.output_ids for answer in answers]


def from_storage(answers: list[Answer]) -> int:
    return sum(answer.cached["storage"] for answer in answers)


@pytest.mark.slow
def test_a_quick_disk_is_read(server: Server, expected: list[list[int]]) -> None:
    server.flush()
    answers = [server.generate(prompt) for prompt in PROMPTS]
    assert [answer.output_ids for answer in answers] == expected
    assert from_storage(answers) == NUM_PROMPTS * aligned(LENGTH)
    state = server.tier_state()
    assert state["load_decision_tokens:load"] >= NUM_PROMPTS * aligned(LENGTH)
    assert state["prefill_tokens_per_second"] > 0
    assert state["load_bytes_per_second:nvme"] > 0


@pytest.mark.slow
def test_slow_disk_is_abandoned_declined_then_used_again(
    server: Server, expected: list[list[int]], slowness: Path
) -> None:
    slowness.write_text("10")
    server.flush()
    begun = time.monotonic()
    assert server.generate(PROMPTS[0]).output_ids == expected[0]
    assert time.monotonic() - begun < 10, "the answer waited for a read that takes 10 s"
    assert server.tier_state()["load_decision_tokens:gave_up"] > 0
    server.flush()  # refused while that read still goes on; it must not stop the server

    slowness.write_text("5")  # still several times what computing takes
    deadline = time.monotonic() + 4 * DEADLINE_S
    while server.tier_state()["load_decision_tokens:declined"] == 0:
        assert time.monotonic() < deadline, "slow loads are never declined"
        server.flush()
        for prompt, ids in zip(PROMPTS, expected, strict=True):
            assert server.generate(prompt).output_ids == ids

    slowness.write_text("0")
    loaded = server.tier_state()["load_decision_tokens:load"]
    deadline = time.monotonic() + DEADLINE_S
    while server.tier_state()["load_decision_tokens:load"] == loaded:
        assert time.monotonic() < deadline, "a disk that recovered is never used again"
        server.flush()
        for prompt, ids in zip(PROMPTS, expected, strict=True):
            assert server.generate(prompt).output_ids == ids
