"""Other KV shapes and other weights: latent attention, weight updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from family_models import write_latent_attention

from conftest import ALWAYS, SMALL, Launch, aligned, make_prompts
from kit.small_model import write_small_model

if TYPE_CHECKING:
    from pathlib import Path

    from server_process import Answer

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

LENGTH = 700
PROMPTS = make_prompts(3, 12, LENGTH)


def share_from_tiers(answers: list[Answer]) -> float:
    hits = sum(answer.cached["host"] + answer.cached["storage"] for answer in answers)
    return hits / (aligned(LENGTH) * len(answers))


@pytest.mark.slow
def test_latent_attention_pages_come_back(launch: Launch, model: Path, tmp_path: Path) -> None:
    latent = write_latent_attention(model, tmp_path / "latent")
    arguments = ("--load-format", "dummy", "--max-total-tokens", "2048")
    tiers = ("--tier-host-bytes", "6MiB", "--tier-dir", str(tmp_path / "kv"), *ALWAYS)
    server = launch(*arguments, *tiers, model_path=latent)
    first, second = (server.generate_all(PROMPTS, concurrency=2) for _ in range(2))
    assert [a.output_ids for a in first] == [a.output_ids for a in second]
    assert share_from_tiers(second) >= 0.97
    assert sum(answer.cached["storage"] for answer in second) > 0

    # Random weights have no identity: a restart must not take them for the same ones.
    server.stop()
    other = launch(*arguments, *tiers, model_path=latent)
    assert other.generate(PROMPTS[0]).num_cached == 0
    other.kill()


@pytest.mark.slow
def test_new_weights_never_read_pages_of_old_ones(
    launch: Launch, model: Path, tmp_path: Path
) -> None:
    retrained = write_small_model(tmp_path / "retrained", seed=1)
    tier_dir = str(tmp_path / "kv")
    reference = launch("--tier-mode", "off", model_path=retrained)
    expected = [reference.generate(prompt).output_ids for prompt in PROMPTS[:4]]
    reference.kill()

    server = launch(*SMALL, "--tier-dir", tier_dir)
    old = [server.generate(prompt).output_ids for prompt in PROMPTS[:4]]
    assert old != expected
    server.wait_for_state("tier_pages:nvme", 4 * (LENGTH // 64))
    server.flush()  # with backups under way SGLang would replace the weights but keep the tree
    update = {"model_path": str(retrained), "flush_cache": True}
    assert server.request("/update_weights_from_disk", update)["success"]
    answers = [server.generate(prompt) for prompt in PROMPTS[:4]]
    assert [answer.output_ids for answer in answers] == expected
    assert all(answer.num_cached == 0 for answer in answers)
    server.wait_for_state("tier_pages:nvme", 4 * (LENGTH // 64))
    server.flush()
    again = [server.generate(prompt) for prompt in PROMPTS[:4]]
    assert [answer.output_ids for answer in again] == expected
    assert all(answer.cached["storage"] == aligned(LENGTH) for answer in again)
    server.kill()
