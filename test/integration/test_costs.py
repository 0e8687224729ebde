"""Loading is measured against computing in the running server, and never waited for in vain."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from conftest import Disk, Launch, make_prompts, until
from sglang_tiered.demo.model import SHAPES, write_model

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_PROMPTS, LENGTH = 8, 1500
PROMPTS = make_prompts(7, NUM_PROMPTS, LENGTH)


def test_slow_disk_is_abandoned_declined_then_used_again(
    launch: Launch, disk: Disk, tmp_path: Path
) -> None:
    sizes = ("--max-total-tokens", "4096", "--tier-host-bytes", "64MiB")
    write_model(tmp_path / "model", 0, SHAPES["8m"])  # which takes long to compute
    server = launch(*sizes, "--tier-dir", str(tmp_path / "kv"), model_path=tmp_path / "model")
    expected = [server.generate(prompt).output_ids for prompt in PROMPTS]
    server.wait_for_state("tier_pages:nvme", NUM_PROMPTS * (LENGTH // 64))

    def decided(what: str) -> float:
        return server.tier_state()[f"load_decision_tokens:{what}"]

    def asked_again(what: str) -> float:
        server.flush()
        assert [server.generate(prompt).output_ids for prompt in PROMPTS] == expected
        return decided(what)

    disk.order(read_s=10)
    server.flush()
    begun = time.monotonic()
    assert server.generate(PROMPTS[0]).output_ids == expected[0]
    assert time.monotonic() - begun < 10, "the answer waited for a read that takes 10 s"
    assert decided("gave_up") > 0
    server.flush()  # refused while that read still goes on; it must not stop the server

    disk.order(read_s=5)  # still several times what computing takes
    until(lambda: asked_again("declined"), "slow loads are never declined", 240.0)
    disk.order()
    loaded = decided("load")
    until(lambda: asked_again("load") > loaded, "a disk that recovered is never used again", 60.0)
