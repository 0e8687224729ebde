"""A host tier that holds less than a prompt: pages still reach NVMe, and come back through it."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import ALWAYS, PAGE, Launch, aligned, make_prompts
from sglang_tiered.demo.model import SHAPES, write_model

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT_PAGES, DEVICE_PAGES, HOST_PAGES = 11, 24, 10
LENGTH = PROMPT_PAGES * PAGE
PROMPTS = make_prompts(7, 5, LENGTH)


def test_small_host_tier_serves_prefixes_evicted_from_device(
    launch: Launch, tmp_path: Path
) -> None:
    """Pages of 16 MiB. Each prompt only once NVMe has the one before: a shared disk may take longer
    than the next prompt, and what host memory has no room for meanwhile is lost."""
    write_model(tmp_path / "model", 0, SHAPES["kv256"])
    server = launch(
        *("--max-total-tokens", str(DEVICE_PAGES * PAGE), *ALWAYS),
        *("--tier-host-bytes", f"{HOST_PAGES * 16}MiB"),
        *("--tier-nvme-bytes", "4GiB", "--tier-dir", str(tmp_path / "kv")),
        model_path=tmp_path / "model",
    )
    expected = []
    for number, prompt in enumerate(PROMPTS, 1):
        expected.append(server.generate(prompt).output_ids)
        server.wait_for_state("tier_pages:nvme", number * PROMPT_PAGES)
    for _ in range(2):
        answers = [server.generate(prompt) for prompt in PROMPTS]
        assert [answer.output_ids for answer in answers] == expected
        wanted = len(PROMPTS) * aligned(LENGTH)
        assert sum(answer.num_cached for answer in answers) >= 0.8 * wanted
    assert server.tier_state()["host_left_pages:lost_host_short"] == 0
    assert "Traceback" not in server.log
