"""What a checkpoint does off the scheduler thread, on real stores: two servers over one directory
of objects."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_pools import PAGE_SIZE, hashes, make_pool
from page_calls import load_pages, store_pages
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from storages import Storages

from sglang_tiered.integration.admin import conversations
from sglang_tiered.integration.admin.conversations import make_durable
from sglang_tiered.integration.storage.backend import TieredStorage
from sglang_tiered.storage.base import NO_TENANT, Tier
from sglang_tiered.storage.region.view import StoredPage

NUM_PAGES = 12
TENANT = b"t" * 16
TIMEOUT_S = 20.0

Open = Callable[..., TieredStorage]


HASHES = hashes(*map(str, range(NUM_PAGES)))
SLOTS = torch.arange(NUM_PAGES * PAGE_SIZE)


@pytest.fixture
def open_server(storages: Storages, monkeypatch: pytest.MonkeyPatch) -> Open:
    """A server's storage by its name, with a KV pool and a pool of windows."""
    monkeypatch.setattr(conversations, "_BATCH_BYTES", 8000)  # a page of KV, a few of windows

    def open_server(name: str, *, has_bucket: bool = True) -> Any:
        storages.configure(name, has_bucket=has_bucket)
        windows = make_pool(1000, 1000, NUM_PAGES)
        return storages.open(make_pool(3000, 3000, NUM_PAGES), {PoolName.SWA: windows})

    return open_server


@pytest.fixture
def resumed(open_server: Open) -> TieredStorage:
    """A server that finds in the bucket what another one computed and made durable there."""
    first, second = open_server("first"), open_server("second")
    assert store_pages(first, HASHES, SLOTS) == [True] * NUM_PAGES
    windows = PoolTransfer(PoolName.SWA, host_indices=SLOTS[-2 * PAGE_SIZE :], keys=HASHES[-2:])
    assert store_pages(first, windows.keys, windows.host_indices, PoolName.SWA) == [True, True]
    assert make_durable(first, HASHES, Tier.OBJECT, NO_TENANT, TIMEOUT_S) == NUM_PAGES
    engine = second.stack
    keys = second.keys_of_pools(HASHES)[:NUM_PAGES]
    assert engine.bucket.refresh(TIMEOUT_S) and all(engine.contains_in_bucket(keys))
    assert not any(second.region_engine.view.contains(keys))
    return second


def test_bucket_pages_reach_nvme_under_their_tenant(resumed: TieredStorage) -> None:
    assert make_durable(resumed, HASHES, Tier.NVME, TENANT, TIMEOUT_S) == NUM_PAGES
    held, at = list[StoredPage](), -1
    while (region := resumed.region_engine.view.pages_behind(at)) is not None:
        at, pages = region
        held += pages
    assert len(held) == NUM_PAGES + 2, "the windows too"
    assert {page.tenant for page in held} == {TENANT}
    assert all(page.is_used for page in held), "reclaim would take them first"
    shutil.rmtree(str(resumed.stack.bucket._requests.directory))  # type: ignore[attr-defined]
    pool = resumed.mem_pool_host
    expected = pool.buffer.clone()
    pool.buffer.zero_()
    assert load_pages(resumed, HASHES, SLOTS) == [True] * NUM_PAGES
    assert torch.equal(pool.buffer, expected)


@pytest.mark.parametrize("lacks", ["objects", "room"])
def test_pages_that_cannot_come_end_a_checkpoint(
    resumed: TieredStorage, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    if lacks == "objects":
        shutil.rmtree(str(resumed.stack.bucket._requests.directory))  # type: ignore[attr-defined]
    else:
        monkeypatch.setattr(resumed.stack._promoter, "_may_store", lambda: False)
    begun = time.monotonic()
    assert make_durable(resumed, HASHES, Tier.NVME, TENANT, 0.5) == 0
    assert time.monotonic() - begun < 5.0


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
