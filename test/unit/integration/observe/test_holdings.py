"""What the tiers hold is told alike by the server and by who looks into its directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_world import DEVICE_TOKENS, HEAD_DIM, HEADS, PAGE, CacheWorld, cache_world, prompt

from sglang_tiered.integration.observe.holdings import holdings

TOKEN_BYTES = 2 * 2 * HEADS * HEAD_DIM * 4  # keys and values of two layers, float32


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheWorld]:
    with cache_world(tmp_path / "kv", monkeypatch) as world:
        yield world


def test_every_tier_is_counted_in_bytes_and_tokens(world: CacheWorld) -> None:
    world.store(prompt(1, 16), prompt(2, 4))
    world.compute(prompt(3, 3))
    found = holdings(world.cache)
    assert set(found) == {"device", "host", "nvme"}
    for tier in found.values():
        assert tier["held_bytes"] == tier["held_tokens"] * TOKEN_BYTES
        assert tier["capacity_tokens"] == tier["capacity_bytes"] // TOKEN_BYTES
    assert found["device"]["capacity_tokens"] == DEVICE_TOKENS
    assert found["host"]["capacity_tokens"] == world.num_host_tokens
    assert found["device"]["held_tokens"] == found["host"]["held_tokens"] == 3 * PAGE
    assert found["nvme"]["held_tokens"] >= 20 * PAGE  # and what was stored of the third since
