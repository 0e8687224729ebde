"""A host tier that device memory outgrows: pages still reach NVMe, and come back through it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from conftest import ALWAYS, Launch, aligned, make_prompts

if TYPE_CHECKING:
    from server_process import Server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

DEVICE_TOKENS = 9_216
PROMPT_TOKENS = 4_224
TOKEN_BYTES = 3 * 2 * 2 * 64 * 4  # layers, keys and values, heads, head dimension, float32


@pytest.fixture(
    params=[pytest.param(0.65, marks=pytest.mark.long), 0.42], ids="host{}".format, scope="module"
)
def server(
    request: pytest.FixtureRequest, launch: Launch, tmp_path_factory: pytest.TempPathFactory
) -> Server:
    """The host tier holds this part of the device pool; 0.42 is less than one prompt."""
    return launch(
        *("--max-total-tokens", str(DEVICE_TOKENS)),
        *("--tier-host-bytes", str(int(request.param * DEVICE_TOKENS * TOKEN_BYTES))),
        *("--tier-dir", str(tmp_path_factory.mktemp("tier") / "kv")),
        *ALWAYS,
    )


def lost_for_lack_of_host_memory(server: Server) -> float:
    return server.tier_state()["host_pages_left:lost_host_short"]


def test_a_host_tier_below_device_memory_serves_what_the_device_gave_up(server: Server) -> None:
    prompts = make_prompts(7, 5, PROMPT_TOKENS)
    expected = [server.generate(prompt).output_ids for prompt in prompts]
    wanted = len(prompts) * aligned(PROMPT_TOKENS)
    for _ in range(2):
        answers = [server.generate(prompt) for prompt in prompts]
        assert [answer.output_ids for answer in answers] == expected
        assert sum(answer.num_cached for answer in answers) >= 0.8 * wanted
    assert lost_for_lack_of_host_memory(server) == 0
    assert "Traceback" not in server.log


def test_what_is_below_a_prefix_that_the_device_still_holds_comes_back(server: Server) -> None:
    """The prefix's host copy gave way long ago; its suffixes left the device."""
    (stem,) = make_prompts(8, 1, 1_024)
    prompts = [stem + tail for tail in make_prompts(9, 5, 3_000)]
    num_pages = server.tier_state()["nvme_pages"] + 1_024 // 64 + len(prompts) * (3_000 // 64 - 1)
    expected = [server.generate(prompt).output_ids for prompt in prompts]
    server.wait_for_state("nvme_pages", num_pages)
    answers = [server.generate(prompt) for prompt in prompts]
    assert [answer.output_ids for answer in answers] == expected
    from_tiers = sum(answer.num_cached - answer.cached["device"] for answer in answers)
    assert from_tiers >= 0.8 * sum(aligned(len(prompt)) - len(stem) for prompt in prompts)
