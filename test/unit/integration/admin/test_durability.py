"""What a checkpoint does off the scheduler thread, on real stores: two servers over one directory
of objects."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from host_pools import PAGE_SIZE, hashes, make_pool, storage_config
from page_calls import load_pages, store_pages
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from sglang_tiered.config import MiB, NvmeConfig, ObjectConfig, TieredConfig, TierMode
from sglang_tiered.integration.admin import conversations
from sglang_tiered.integration.admin.conversations import make_durable
from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.storage.backend import TieredStorage
from sglang_tiered.storage.base import NO_TENANT, Tier

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_tiered.storage.region.view import StoredPage

NUM_PAGES = 12
TENANT = b"t" * 16
TIMEOUT_S = 20.0

Open = Callable[..., TieredStorage]


HASHES = hashes(*map(str, range(NUM_PAGES)))
SLOTS = torch.arange(NUM_PAGES * PAGE_SIZE)


@pytest.fixture
def open_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """A server's storage by its name, with a KV pool and a pool of windows."""
    monkeypatch.setattr(namespace, "server_identity", lambda config: {"model": "m"})
    monkeypatch.setattr(conversations, "_BATCH_BYTES", 8000)  # a page of KV, a few of windows
    opened = []

    def open_server(name: str, *, has_bucket: bool = True) -> TieredStorage:
        nvme = NvmeConfig(
            directory=str(tmp_path / name), capacity_bytes=64 * MiB, region_bytes=4 * MiB
        )
        config = TieredConfig(
            mode=TierMode.NVME,
            host_bytes=MiB,
            nvme=nvme,
            object=ObjectConfig(url=(tmp_path / "bucket").as_uri()) if has_bucket else None,
        )
        environment: dict[str, str] = {}
        config.to_environment(environment)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        storage: Any = TieredStorage(storage_config(), {})
        opened.append(storage)
        storage.register_mem_pool_host(make_pool(3000, 3000, NUM_PAGES))
        storage.register_mem_host_pool_v2(make_pool(1000, 1000, NUM_PAGES), PoolName.SWA)
        storage.on_host_pools_registered()
        found: TieredStorage = storage
        return found

    yield open_server
    for storage in opened:
        storage.close()


def stored_pages(server: TieredStorage) -> list[StoredPage]:
    found = []
    at = -1
    while (region := server.region_engine.view.pages_behind(at)) is not None:
        at, pages = region
        found += pages
    return found


@pytest.fixture
def resumed(open_server: Open) -> TieredStorage:
    """A server that finds in the bucket what another one computed and made durable there."""
    first, second = open_server("first"), open_server("second")
    assert store_pages(first, HASHES, SLOTS) == [True] * NUM_PAGES
    windows = PoolTransfer(PoolName.SWA, host_indices=SLOTS[-2 * PAGE_SIZE :], keys=HASHES[-2:])
    assert store_pages(first, windows.keys, windows.host_indices, PoolName.SWA) == [True, True]
    assert make_durable(first, HASHES, Tier.OBJECT, NO_TENANT, TIMEOUT_S) == NUM_PAGES
    engine = second.stack
    assert engine is not None
    keys = second.keys_of_pools(HASHES)[:NUM_PAGES]
    deadline = time.monotonic() + TIMEOUT_S
    while not all(engine.contains_in_bucket(keys)):
        assert time.monotonic() < deadline
        engine.bucket.refresh(1.0)
    assert not any(second.region_engine.view.contains(keys))
    return second


def test_bucket_pages_reach_nvme_under_their_tenant(
    resumed: TieredStorage,
) -> None:
    assert make_durable(resumed, HASHES, Tier.NVME, TENANT, TIMEOUT_S) == NUM_PAGES
    held = stored_pages(resumed)
    assert len(held) == NUM_PAGES + 2, "the windows too"
    assert {page.tenant for page in held} == {TENANT}
    assert all(page.is_used for page in held), "reclaim would take them first"
    shutil.rmtree(str(resumed.stack.bucket._requests.directory))  # type: ignore[attr-defined]
    pool = resumed.mem_pool_host
    expected = pool.buffer.clone()
    pool.buffer.zero_()
    assert load_pages(resumed, HASHES, SLOTS) == [True] * NUM_PAGES
    assert torch.equal(pool.buffer, expected)


def test_nvme_that_stores_nothing_ends_a_checkpoint(
    resumed: TieredStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumed.stack._promoter, "_may_store", lambda: False)
    begun = time.monotonic()
    assert make_durable(resumed, HASHES, Tier.NVME, TENANT, 0.5) == 0
    assert time.monotonic() - begun < 5.0


def test_bucket_without_its_objects_ends_a_checkpoint(resumed: TieredStorage) -> None:
    shutil.rmtree(str(resumed.stack.bucket._requests.directory))  # type: ignore[attr-defined]
    begun = time.monotonic()
    assert make_durable(resumed, HASHES, Tier.NVME, TENANT, 0.5) == 0
    assert time.monotonic() - begun < 5.0


def test_checkpoint_counts_as_use_of_nvme_pages(open_server: Open) -> None:
    server = open_server("first", has_bucket=False)
    store_pages(server, HASHES, SLOTS)
    assert make_durable(server, HASHES[:3], Tier.NVME, NO_TENANT, TIMEOUT_S) == 3
    used = {page.key.hex() for page in stored_pages(server) if page.is_used}
    assert used == set(HASHES[:3])


def test_page_stored_during_the_flush_does_not_count(
    open_server: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = open_server("first", has_bucket=False)
    early = 8
    store_pages(server, HASHES[:early], SLOTS[: early * PAGE_SIZE])
    shard = server.region_engine
    flush = shard.flush

    def flush_then_store(timeout_s: float) -> bool:
        is_synced = flush(timeout_s)
        late = store_pages(server, HASHES[early:], SLOTS[early * PAGE_SIZE :])
        assert all(late)
        return is_synced

    monkeypatch.setattr(shard, "flush", flush_then_store)
    assert make_durable(server, HASHES, Tier.NVME, NO_TENANT, 0.5) == early
