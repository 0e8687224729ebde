"""The asynchronous platform tells what an idle scheduler must not hold, on real tree and pools."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rest
from cache_world import PAGE, CacheWorld, prompt
from report import Report

TOKENS = prompt(1, 4)


@pytest.fixture
def world(world: CacheWorld, monkeypatch: pytest.MonkeyPatch) -> CacheWorld:
    monkeypatch.setattr(rest, "LOOK_S", 0.0)
    world.compute(TOKENS)
    world.until(lambda: rest.is_at_rest(scheduler(world)))
    return world


def scheduler(world: CacheWorld) -> Any:
    return SimpleNamespace(tree_cache=world.cache, is_fully_idle=lambda: True)


def told(world: CacheWorld, orders: Path | None = None) -> list[str]:
    report = Report()
    looks = rest.Rest(report, None if orders is None else str(orders))
    for _ in range(2 * rest.TIMES):
        looks.look(scheduler(world))
    return [str({**entry, "stack": None}) for entry in report.violations]


def test_only_what_stays_at_rest_is_told(world: CacheWorld, tmp_path: Path) -> None:
    assert told(world) == []
    lock = world.cache.lock(world.match(TOKENS).last_device_node)
    (line,) = told(world)
    assert f"{4 * PAGE} tokens are locked" in line
    world.cache.unlock(lock)
    orders = tmp_path / "orders"
    orders.write_text("first")
    assert told(world, orders) == []
    host = world.cache.cache_controller.mem_pool_host
    assert host.available_size() == host.logical_size
    host.alloc(PAGE)
    orders.write_text("second")
    (line,) = told(world, orders)
    assert "host-memory-lost" in line
