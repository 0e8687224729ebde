"""What the tiers hold is told alike by the server and by who looks into its directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_world import DEVICE_TOKENS, HEAD_DIM, HEADS, PAGE, CacheWorld, cache_world, prompt

from sglang_tiered.integration.observe.stats import holdings
from sglang_tiered.tools.store.cli import main

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


def test_store_stat_counts_the_tokens_stored(
    world: CacheWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.store(prompt(1, 16), prompt(2, 4))
    storage: Any = world.cache.storage
    storage._noting.join(20.0)
    assert storage.region_engine.flush(20.0)
    capsys.readouterr()
    assert main(["stat", str(tmp_path / "kv"), "--json"]) == 0
    total = json.loads(capsys.readouterr().out)["total"]
    assert total["tokens"] == total["namespaces"][0]["tokens"] == 20 * PAGE
    assert holdings(world.cache)["nvme"]["held_tokens"] == 20 * PAGE


def test_tokens_of_windows_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pages of the window's pool are as long as those of the other."""
    with cache_world(tmp_path / "kv", monkeypatch, has_window=True) as world:
        world.store(prompt(1, 16))
        storage: Any = world.cache.storage
        storage._noting.join(20.0)
        assert storage.region_engine.flush(20.0)
        capsys.readouterr()
        assert main(["stat", str(tmp_path / "kv"), "--json"]) == 0
        tokens = json.loads(capsys.readouterr().out)["total"]["tokens"]
        assert 16 * PAGE // 2 <= tokens <= 16 * PAGE  # an estimate: windows are not kept whole
