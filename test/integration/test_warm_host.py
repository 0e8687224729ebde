"""``--tier-warm-host``: what came back before a restart is in host memory after it, unasked."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import ALWAYS, Launch, aligned, make_prompts, residency, until
from server_process import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

NUM_PROMPTS, LENGTH = 6, 700
PROMPTS = make_prompts(11, NUM_PROMPTS, LENGTH)
FLAGS = ["--max-total-tokens", "4096", "--tier-host-bytes", "64MiB", "--tier-warm-host", "on"]


def num_warm(server: Server, prompt: list[int], tenant: dict[str, str]) -> int:
    """Tokens of a prompt in host memory."""
    return residency(server, prompt, **tenant)["host"]


def wait_until_warm(server: Server, prompt: list[int], tenant: dict[str, str]) -> None:
    until(lambda: num_warm(server, prompt, tenant) >= aligned(LENGTH), "the host tier is cold")


@pytest.mark.slow
def test_restarted_server_serves_hot_prefixes_from_host(
    launch: Launch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tier_dir: Path = tmp_path_factory.mktemp("tier") / "kv"
    flags = (*FLAGS, *ALWAYS, "--tier-dir", str(tier_dir))
    first = launch(*flags)
    # One tenant of each kind, to come back under the names they left.
    kinds: list[dict[str, str]] = [{}, {"extra_key": "x"}, {"cache_salt": "s"}]
    tenants = kinds * (NUM_PROMPTS // len(kinds))
    asked = list(zip(PROMPTS, tenants, strict=True))
    expected = [first.generate(prompt, **tenant).output_ids for prompt, tenant in asked]
    first.wait_for_state("tier_pages:nvme", NUM_PROMPTS * (LENGTH // 64))
    first.flush()
    for prompt, tenant in asked:
        assert first.generate(prompt, **tenant).num_cached == aligned(LENGTH)
    first.stop()
    assert [path.stat().st_mode & 0o077 for path in tier_dir.rglob("WARM")] == [0]

    second = launch(*flags)
    # Those of no tenant at once; those of a tenant once one of them has come back.
    first_ones, later_ones = asked[: len(kinds)], asked[len(kinds) :]
    for prompt, tenant in asked:
        if not tenant:
            wait_until_warm(second, prompt, tenant)
    assert [num_warm(second, *each) for each in asked if each[1]] == [0] * 4
    for prompt, tenant in first_ones:
        second.generate(prompt, **tenant)
    for (prompt, tenant), ids in zip(later_ones, expected[len(kinds) :], strict=True):
        wait_until_warm(second, prompt, tenant)
        answer = second.generate(prompt, **tenant)
        assert answer.output_ids == ids
        assert answer.cached["host"] == aligned(LENGTH), answer.cached
        assert answer.cached["storage"] == 0
    second.kill()

    # A damaged list is no list: the server starts, and asks NVMe when asked.
    for path in tier_dir.rglob("WARM"):
        path.write_bytes(path.read_bytes()[:-7])
    third = launch(*flags)
    answer = third.generate(PROMPTS[0])
    assert answer.output_ids == expected[0]
    assert answer.cached["storage"] == aligned(LENGTH)
