"""A host tier that device memory outgrows: pages still reach NVMe, and come back through it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

from conftest import ALWAYS, ROOT, Launch, aligned, make_prompts
from server_process import Server

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = 64


@dataclass(frozen=True)
class Size:
    """Of a prompt, in pages, of the device pool, about two prompts, and of the host tier."""

    prompt: int
    device: int
    host_share: float  # of the device pool
    token_bytes: int
    shape: str


SIZES = {
    "most_of_the_device": Size(66, 144, 0.65, 3 * 2 * 2 * 64 * 4, "8m"),
    "less_than_a_prompt_of_pages_of_16_MiB": Size(11, 24, 0.42, 256 << 10, "kv256"),
}


@dataclass(frozen=True)
class Small:
    server: Server
    prompt_tokens: int


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.long] if name == "most_of_the_device" else [])
        for name in SIZES
    ],
    scope="module",
)
def small(
    request: pytest.FixtureRequest, launch: Launch, tmp_path_factory: pytest.TempPathFactory
) -> Small:
    size = SIZES[request.param]
    folder = tmp_path_factory.mktemp("tier")
    maker = [sys.executable, str(ROOT / "scripts" / "make_demo_model.py"), str(folder / "model")]
    subprocess.run([*maker, "--shape", size.shape], check=True, timeout=120)
    device_tokens = size.device * PAGE
    server = launch(
        *("--max-total-tokens", str(device_tokens)),
        *("--tier-host-bytes", str(int(size.host_share * device_tokens * size.token_bytes))),
        *("--tier-nvme-bytes", "4GiB", "--tier-dir", str(folder / "kv")),
        *ALWAYS,
        model_path=folder / "model",
    )
    return Small(server, size.prompt * PAGE)


def lost_for_lack_of_host_memory(server: Server) -> float:
    return server.tier_state()["host_left_pages:lost_host_short"]


def one_by_one(
    server: Server, prompts: list[list[int]], num_before: float, num_each: int
) -> list[list[int]]:
    """Each only once NVMe has the pages of the one before: a disk that many share takes longer than
    the next prompt, and what host memory has no room for meanwhile is lost."""
    outputs = []
    for number, prompt in enumerate(prompts, 1):
        outputs.append(server.generate(prompt).output_ids)
        server.wait_for_state("tier_pages:nvme", num_before + number * num_each)
    return outputs


def test_small_host_tier_serves_prefixes_evicted_from_device(small: Small) -> None:
    server = small.server
    prompts = make_prompts(7, 5, small.prompt_tokens)
    expected = one_by_one(server, prompts, 0, small.prompt_tokens // PAGE)
    wanted = len(prompts) * aligned(small.prompt_tokens)
    for _ in range(2):
        answers = [server.generate(prompt) for prompt in prompts]
        assert [answer.output_ids for answer in answers] == expected
        assert sum(answer.num_cached for answer in answers) >= 0.8 * wanted
    assert lost_for_lack_of_host_memory(server) == 0
    assert "Traceback" not in server.log
