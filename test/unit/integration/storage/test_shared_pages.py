"""Two ranks of latent attention over one shard; only their meeting is not SGLang's."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from host_pools import PAGE, hashes, heads_pools, latent_pools, storage_config
from page_calls import load_pages, store_pages
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from storages import Storages

from kit.waiting import eventually
from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import MiB
from sglang_tiered.integration.admin.conversations import make_durable
from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.observe.stats import process_stats
from sglang_tiered.integration.storage import shared_pages
from sglang_tiered.integration.storage.backend import TieredStorage
from sglang_tiered.storage.base import Erasure, Tier
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region.directory import shard_path
from sglang_tiered.storage.region.format import region_name

TIMEOUT_S = 20.0
LAYERS = 2
PAGE_BYTES = PAGE * LAYERS * 80 * 2
KEYS = hashes("a", "b", "c")
TENANT = b"a" * 16


def latent_pool(seed: int | None = None) -> MLATokenToKVPoolHost:
    _, pool = latent_pools(LAYERS)
    pool.kv_buffer.zero_()
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape, generator=generator))
    return pool


def slots(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


class Ranks:
    """Opens the storages of all ranks of a server, each in its thread, and closes them all."""

    def __init__(self, storages: Storages, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self._storages = folder / "kv", storages
        self._patch = monkeypatch
        self.identities: list[Any] = [{"model": "m"}] * 3
        monkeypatch.setattr(namespace, "has_draft", lambda: False)

    def open(self, *pools: Any, **settings: Any) -> list[TieredStorage]:
        """A rank for each pool. Raises what the first rank that fails does."""
        number = len(pools)
        self._storages.configure(num_ranks=number, tp_size=number, **settings)
        ranks, values = threading.local(), [None] * number
        meeting = threading.Barrier(number)

        def gather(value: Any) -> list[Any]:
            values[ranks.own] = value
            meeting.wait(TIMEOUT_S)
            gathered = list(values)
            meeting.wait(TIMEOUT_S)
            return gathered

        def identity(where: Any) -> Any:
            own = self.identities[ranks.own]
            if isinstance(own, Exception):
                raise own
            return {**own, "tp": [where.tp_rank, where.tp_size]}

        def start(rank: int) -> None:
            ranks.own = rank
            storages[rank].on_host_pools_registered()

        self._patch.setattr(shared_pages, "gather_over_ranks", gather)
        self._patch.setattr(namespace, "server_identity", identity)
        storages = []
        for rank, pool in enumerate(pools):
            where = storage_config(tp_rank=rank, tp_size=number, is_mla_model=True)
            storage = TieredStorage(where, {})
            storage.register_mem_pool_host(pool)
            storages.append(storage)
        self._storages.opened += storages
        with ThreadPoolExecutor(number) as threads:
            started = [threads.submit(start, rank) for rank in range(number)]
        failures = [each.exception() for each in started]
        assert all(failures) or not any(failures), f"all ranks have the tiers, or none: {failures}"
        if failures[0] is not None:
            raise failures[0]
        return storages

    def close(self) -> None:
        self._storages.close()

    def shards(self) -> list[str]:
        return sorted(path.name for path in self.directory.glob("shard-*"))


@pytest.fixture
def ranks(storages: Storages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    (tmp_path / "kv").mkdir()
    return Ranks(storages, tmp_path, monkeypatch)


def store(storages: Sequence[TieredStorage]) -> None:
    """As SGLang asks of every rank."""
    for storage in storages:
        assert store_pages(storage, KEYS, slots(0, 1, 2)) == [True] * 3


def load(storage: TieredStorage) -> list[bool]:
    return load_pages(storage, KEYS, slots(5, 6, 7))


SHARD = "shard-tp0of1-pp0of1-dp0-0"


def test_pages_stored_once_load_and_go_everywhere(ranks: Ranks) -> None:
    pools = [latent_pool(1), latent_pool(1), latent_pool(1)]
    storages = ranks.open(*pools)
    expected = pools[0].kv_buffer[0:3].clone()
    store(storages)
    assert [storage.region_engine.stats().stored_bytes for storage in storages] == [
        *(3 * PAGE_BYTES, 0, 0)
    ]
    for storage, pool in zip(storages, pools, strict=True):
        pool.kv_buffer.zero_()
        assert storage.batch_exists(KEYS) == 3
        assert load(storage) == [True] * 3
        assert torch.equal(pool.kv_buffer[5:8], expected)
        assert storage.accounting.num_dirty == 0
    assert ranks.shards() == [SHARD]
    assert storages[0].region_engine.stats().capacity_bytes == 64 * MiB
    purges = [storage.erase(Erasure()) for storage in reversed(storages)]
    assert all(is_true(purge, TIMEOUT_S) for purge in purges)
    assert [load(storage) for storage in storages] == [[False] * 3] * 3


def test_a_server_with_other_ranks_finds_pages(ranks: Ranks) -> None:
    for number in (1, 3, 2, 1):
        storages = ranks.open(*(latent_pool(1) for _ in range(number)))
        if number == 1 and not process_stats(storages[0])["nvme"].num_pages:
            store(storages)
        assert [load(storage) for storage in storages] == [[True] * 3] * number
        ranks.close()
    assert ranks.shards() == [SHARD]


def test_a_rank_with_other_weights_gets_no_page(ranks: Ranks) -> None:
    ranks.identities = [{"model": "m"}, {"model": "of another revision"}]
    first, second = ranks.open(latent_pool(1), latent_pool(1))
    store([first, second])
    assert load(first) == [True] * 3
    assert load(second) == [False] * 3


def test_weights_changed_rank_by_rank_mix_nothing(ranks: Ranks) -> None:
    first, second = storages = ranks.open(latent_pool(1), latent_pool(1))
    store(storages)
    second.change_weights(tree_is_empty=True)
    assert load(second) == [False] * 3, "of the weights before"
    first.change_weights(tree_is_empty=True)
    assert load(second) == [False] * 3
    store(storages)
    assert [load(storage) for storage in storages] == [[True] * 3] * 2
    first.change_weights(tree_is_empty=True)
    store([first])
    assert load(second) == [False] * 3, "of the weights after"


@pytest.mark.parametrize("reason", ["the weights are gone", ""])
@pytest.mark.parametrize("failing", [0, 1])
def test_tiers_one_rank_cannot_open_stay_closed(ranks: Ranks, failing: int, reason: str) -> None:
    ranks.identities[failing] = ConfigError(reason)
    with pytest.raises(ConfigError, match=f"{reason}$"):
        ranks.open(latent_pool(), latent_pool())
    ranks.identities = [{"model": "m"}] * 2
    store(ranks.open(latent_pool(1), latent_pool(1)))  # the shard was let go


def test_bucket_pages_reach_every_rank(ranks: Ranks) -> None:
    first, second = storages = ranks.open(latent_pool(1), latent_pool(1), has_bucket=True)
    store(storages)
    assert first.has_object_tier and second.has_object_tier
    for tier in (Tier.OBJECT, Tier.NVME):
        assert [make_durable(each, KEYS, tier, bytes(16)) for each in storages] == [3, 3]
    held = {Tier.NVME: 3, Tier.OBJECT: 3}  # of as many tiers each, or they could not be reduced
    assert first.pages_by_tier(KEYS) == second.pages_by_tier(KEYS) == held
    ranks.close()
    for path in sorted((ranks.directory / SHARD).glob("region-*")):
        path.unlink()
    pools = [latent_pool(), latent_pool()]
    first, second = ranks.open(*pools, has_bucket=True)
    eventually(lambda: first.batch_exists(KEYS) == 3, "the bucket is listed in the background")
    assert not second.stack.remote
    assert load(second) == [True] * 3
    expected = latent_pool(1).kv_buffer[0:3]
    assert torch.equal(pools[1].kv_buffer[5:8], expected)
    # The lender loads what its borrowers do, and knows whose it is.
    assert load_pages(first, KEYS, slots(5, 6, 7), tenant=TENANT) == [True] * 3
    eventually(lambda: first.pages_by_tier(KEYS)[Tier.NVME] == 3)
    (usage,) = first.region_engine.tenants(2)
    assert (usage.tenant, usage.num_pages) == (TENANT, 3)


def test_the_lender_opens_no_more_files_than_allowed(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_pages, "max_regions", lambda: 8)
    first, _ = ranks.open(latent_pool(1), latent_pool(1))
    store([first])
    (region,) = (ranks.directory / SHARD).glob("region-*")
    assert region.stat().st_size == 8 * MiB
    assert first.region_engine.stats().capacity_bytes == 64 * MiB


@pytest.mark.parametrize("shares", [True, False])
def test_shards_of_another_sharing_take_no_space(
    ranks: Ranks, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {True: ["tp0of1"], False: ["tp0of2", "tp1of2"]}
    for kind in (True, False):
        for name in names[kind]:
            shard = shard_path(ranks.directory, f"{name}-pp0of1-dp0-0")
            shard.mkdir()
            (shard / region_name(0)).write_bytes(b"pages")
    monkeypatch.setattr(namespace, "has_draft", lambda: not shares)
    ranks.open(latent_pool(), latent_pool())
    assert ranks.shards() == [f"shard-{name}-pp0of1-dp0-0" for name in names[shares]]


def test_ranks_whose_pages_differ_keep_their_own(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By heads, or with a draft model's pool, which may be by heads."""
    where = storage_config(tp_rank=1, tp_size=2)

    def same(*pools: Any, is_replicated: bool = True, **changes: Any) -> bool:
        changed = storage_config(tp_rank=1, **{"tp_size": 2, **changes})
        return shared_pages.are_pages_same(changed, pools, is_replicated=is_replicated)

    latent, (_, heads) = latent_pool(), heads_pools(LAYERS)
    assert where.tp_size == 2 and same(latent)
    assert not same(latent, heads) and not same(heads) and not same(latent, is_replicated=False)
    assert not same(latent, attn_cp_size=2)
    monkeypatch.setattr(namespace, "has_draft", lambda: True)
    assert not same(latent)
