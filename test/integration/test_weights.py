"""A server serves while its weights are read, stores what it computed meanwhile, and never reads
pages of the weights that it had before."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import pytest

from conftest import SMALL, Launch, aligned, make_prompts
from kit.small_model import write_small_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH = 700
PROMPTS = make_prompts(41, 3, LENGTH)
NUM_PAGES = len(PROMPTS) * (LENGTH // 64)
READING, KNOWN = "of weights in the background", "weights are known"


def test_stores_wait_until_large_weights_are_read(launch: Launch, tmp_path: Path) -> None:
    tier = tmp_path / "kv"
    tier.mkdir(mode=0o700)
    held = os.open(tier, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)  # as another process that reads
    server = launch(*SMALL, "--tier-dir", str(tier))
    answers = [answer.output_ids for answer in server.generate_all(PROMPTS)]
    assert READING in server.log and KNOWN not in server.log
    assert server.tier_state()["tier_pages:nvme"] == 0
    os.close(held)
    server.wait_for_state("tier_pages:nvme", NUM_PAGES)
    assert KNOWN in server.log
    server.kill()
    again = launch(*SMALL, "--tier-dir", str(tier))
    returned = again.generate_all(PROMPTS)
    assert READING not in again.log
    assert [answer.output_ids for answer in returned] == answers
    assert sum(answer.cached["storage"] for answer in returned) == len(PROMPTS) * aligned(LENGTH)
    again.kill()


def test_new_weights_never_read_pages_of_old_ones(
    launch: Launch, model: Path, tmp_path: Path
) -> None:
    retrained = write_small_model(tmp_path / "retrained", seed=1)
    tier_dir = str(tmp_path / "kv")
    reference = launch("--tier-mode", "off", model_path=retrained)
    expected = [reference.generate(prompt).output_ids for prompt in PROMPTS]
    reference.kill()

    server = launch(*SMALL, "--tier-dir", tier_dir)
    old = [server.generate(prompt).output_ids for prompt in PROMPTS]
    assert old != expected
    server.wait_for_state("tier_pages:nvme", NUM_PAGES)
    server.flush()  # with backups under way SGLang would replace the weights but keep the tree
    update = {"model_path": str(retrained), "flush_cache": True}
    assert server.request("/update_weights_from_disk", update)["success"]
    answers = [server.generate(prompt) for prompt in PROMPTS]
    assert [answer.output_ids for answer in answers] == expected
    assert all(answer.num_cached == 0 for answer in answers)
    server.wait_for_state("tier_pages:nvme", NUM_PAGES)
    server.flush()
    again = [server.generate(prompt) for prompt in PROMPTS]
    assert [answer.output_ids for answer in again] == expected
    assert all(answer.cached["storage"] == aligned(LENGTH) for answer in again)
    server.kill()
