"""A storage over pools whose pages are of 16 and 32 MiB: what the tiers are opened with lets them
through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from host_pools import Pool, hashes, make_pool, slots, storage_config
from page_calls import load_pages, store_pages
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE

from kit.waiting import drained
from sglang_tiered.config import (
    GiB,
    MiB,
    NvmeConfig,
    ObjectConfig,
    TieredConfig,
    TierMode,
)
from sglang_tiered.errors import ConfigError
from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.storage.backend import TieredStorage
from sglang_tiered.storage.base import Tier

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)

TIMEOUT_S = 120.0
NAMES = [str(number) for number in range(10)]
Open = Callable[..., Any]


@pytest.fixture
def open_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """``open_storage(pool, **nvme)``: with a bucket in a directory beneath it."""
    opened: list[TieredStorage] = []

    def open_storage(pool: Pool, *, bucket: bool = False, **changes: Any) -> Any:
        nvme = NvmeConfig(
            directory=str(tmp_path / "kv"), capacity_bytes=640 * MiB, region_bytes=32 * MiB
        )
        config = TieredConfig(
            mode=TierMode.NVME,
            host_bytes=MiB,
            nvme=msgspec.structs.replace(nvme, **changes),
            object=ObjectConfig(url=(tmp_path / "bucket").as_uri()) if bucket else None,
        )
        environment: dict[str, str] = {}
        config.to_environment(environment)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        storage = TieredStorage(storage_config(), {})
        opened.append(storage)
        storage.register_mem_pool_host(pool)
        storage.on_host_pools_registered()
        return storage

    monkeypatch.setattr(namespace, "server_identity", lambda config: {"model": "m"})
    yield open_storage
    for storage in opened:
        storage.close()


def test_a_large_page_gets_a_larger_region(open_storage: Open) -> None:
    pool = make_pool(0, page_bytes=16 * MiB, num_pages=4)
    before = pool.buffer[:, :2].clone()
    storage = open_storage(pool)
    assert store_pages(storage, hashes("a", "b"), slots(0, 1)) == [True] * 2
    assert load_pages(storage, hashes("a", "b"), slots(2, 3)) == [True] * 2
    assert torch.equal(pool.buffer[:, 2:], before)


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ({"capacity_bytes": 64 * MiB}, "--tier-nvme-bytes leaves a rank 64MiB"),
        ({"tenant_share": 0.1}, "--tier-tenant-share leaves a rank 64MiB"),
        ({"writes_per_day": 320 * MiB}, "--tier-nvme-writes-per-day leaves a rank 320MiB"),
    ],
)
def test_a_tier_too_small_for_pages_is_refused(
    open_storage: Open, bounds: dict[str, Any], says: str
) -> None:
    pool = make_pool(None, page_bytes=16 * MiB, num_pages=1)
    with pytest.raises(ConfigError, match=f"{says}, which is too small for pages of 32MiB"):
        open_storage(pool, **bounds)


def test_two_of_sglangs_calls_fit_the_queue(open_storage: Open) -> None:
    """One is SGLang's; the room of the other is for what remote tiers bring, or it would cost the
    first its tail."""
    pool = make_pool(None, page_bytes=8 * MiB, num_pages=1)
    engine = open_storage(pool).region_engine
    assert engine._max_queued_store_bytes == 2 * STORAGE_BATCH_SIZE * 16 * MiB == 4 * GiB


def test_leading_large_bucket_pages_are_kept_on_nvme(open_storage: Open, tmp_path: Path) -> None:
    pool = make_pool(0, page_bytes=16 * MiB, num_pages=10)
    before = pool.buffer.clone()
    keys = hashes(*NAMES)
    first = open_storage(pool, bucket=True)
    assert store_pages(first, keys, slots(*range(10))) == [True] * 10
    engine_keys = first.keys_of_pools(keys)
    assert all(first.stack.flush_to_bucket(engine_keys, TIMEOUT_S)), "the bucket takes no such page"
    first.close()
    pool.buffer.zero_()
    second = open_storage(pool, bucket=True, directory=str(tmp_path / "other"))
    stack = second.stack
    assert stack.bucket.refresh(TIMEOUT_S)
    loaded = load_pages(second, keys, slots(*range(10)), tenant=b"a" * 16)
    assert loaded == [True] * 10
    assert torch.equal(pool.buffer, before)
    assert drained(stack, TIMEOUT_S) and drained(stack.nvme, TIMEOUT_S)
    stats = stack.remote_stats(Tier.OBJECT)
    assert (stats.num_promoted, stats.num_promotions_dropped) == (8, 2)
    assert stack.nvme.lookup(engine_keys).num_hits == 8
