"""A server serves while its weights are read, stores what it computed meanwhile, and never reads
pages of the weights that it had before."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import SMALL, Launch, aligned, make_prompts
from kit.small_model import write_small_model

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH = 700
PROMPTS = make_prompts(41, 3, LENGTH)
NUM_PAGES = len(PROMPTS) * (LENGTH // 64)
READING, KNOWN = "of weights in the background", "weights are known"


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
