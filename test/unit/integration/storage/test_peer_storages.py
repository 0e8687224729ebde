"""Two storages that follow each other: what comes from the other, and purges that cross over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from host_pools import Pool, hashes, make_pool, slots
from page_calls import load_pages, queue_store, store_pages
from peer_servers import know_each_other
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from storages import Storages, Weights

from kit.waiting import eventually
from server_process import free_port
from sglang_tiered.integration.observe.stats import process_stats
from sglang_tiered.remote_config import PeerConfig
from sglang_tiered.storage.base import Erasure, Span, Tier
from sglang_tiered.storage.promises import is_true

pytestmark = pytest.mark.timeout(120)

TIMEOUT_S = 20.0
TENANT = b"a" * 16


@dataclass
class Side:
    storage: Any
    pools: dict[PoolName, Pool]


OpenSide = Callable[[str, int | None], Side]


@pytest.fixture
def open_side(storages: Storages) -> OpenSide:
    ports = {name: free_port() for name in "ab"}
    servers = ",".join(f"127.0.0.1:{port}" for port in ports.values())

    def open_side(name: str, seed: int | None) -> Side:
        storages.configure(name, peers=PeerConfig(servers=servers, port=ports[name]))
        other = None if seed is None else seed + 1
        pools = {PoolName.KV: make_pool(seed), PoolName.SWA: make_pool(other, 500)}
        return Side(storages.open(pools[PoolName.KV], {PoolName.SWA: pools[PoolName.SWA]}), pools)

    return open_side


def store(side: Side, keys: list[str], pages: torch.Tensor, tenant: bytes = TENANT) -> None:
    storage = side.storage
    node = queue_store(storage, keys, tenant=tenant)
    for pool in (PoolName.SWA, PoolName.KV):
        assert store_pages(storage, keys, pages, pool, store=node) == [True] * len(keys)


def test_every_pool_comes_from_peers_bit_for_bit(open_side: OpenSide) -> None:
    a, b = open_side("a", 7), open_side("b", None)
    keys = hashes("x", "y", "z")
    store(a, keys, slots(3, 1, 7))
    eventually(lambda: b.storage.lookup_leading(keys) == 3, "not found")
    assert b.storage.lookup_spans(keys) == [Span(Tier.PEER, 3)]
    window = PoolTransfer(PoolName.SWA, keys=keys[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert b.storage.batch_exists_v2(keys, [window]).kv_hit_pages == 3
    # Else it would never be stored here, and be lost when the other gives it up.
    assert not b.storage.holds(keys[0]) and b.storage.num_kept(keys) == 0
    assert b.storage.pages_by_tier(keys) == {Tier.NVME: 0, Tier.PEER: 3}
    assert not b.storage.has_object_tier
    for pool in (PoolName.SWA, PoolName.KV):
        loaded = load_pages(b.storage, keys, slots(8, 9, 10), pool, tenant=TENANT)
        assert loaded == [True] * 3
    for name in (PoolName.KV, PoolName.SWA):
        for source, target in zip((3, 1, 7), (8, 9, 10), strict=True):
            found, expected = b.pools[name].buffer, a.pools[name].buffer
            assert torch.equal(found[:, target], expected[:, source])
    eventually(lambda: b.storage.pages_by_tier(keys)[Tier.NVME] == 3, "not kept")
    assert b.storage.holds(keys[0]) and b.storage.num_kept(keys) == 3
    stats = process_stats(b.storage)["peer"]
    assert (stats["tier"].num_fetched, stats["moved"].num_promoted) == (6, 6)
    assert stats["tier"].num_peers == 1
    assert process_stats(a.storage)["peer"]["tier"].num_served == 6
    assert process_stats(a.storage)["nvme"].num_pages_from_memory == 3, "KV was read from NVMe"


def test_a_purge_reaches_peers_and_blocks_their_stores(open_side: OpenSide) -> None:
    a, b = open_side("a", 7), open_side("b", 7)
    keys, other = hashes("x", "y"), hashes("z")
    store(b, keys, slots(0, 1))
    store(b, other, slots(2), tenant=b"b" * 16)
    eventually(lambda: a.storage.lookup_leading(keys) == 2, "not found")
    purge = a.storage.erase(Erasure(tenant=TENANT))
    assert is_true(purge, TIMEOUT_S)
    eventually(lambda: b.storage.num_kept(keys) == 0, "still there")
    eventually(lambda: a.storage.lookup_leading(keys) == 0, "found where it was purged")
    assert b.storage.num_kept(other) == 1
    stored = store_pages(b.storage, keys, slots(0, 1), tenant=TENANT)
    assert stored == [False] * 2, "memory may still hold it"
    store(b, hashes("new"), slots(3), tenant=b"b" * 16)


def test_after_a_weight_update_nothing_is_shared(open_side: OpenSide) -> None:
    """Nobody can name the weights that a running server was given."""
    a, b = open_side("a", 7), open_side("b", None)
    keys = hashes("x")
    store(a, keys, slots(0))
    eventually(lambda: b.storage.lookup_leading(keys) == 1, "not found")
    b.storage.change_weights(tree_is_empty=True)
    assert b.storage.lookup_leading(keys) == 0
    a.storage.change_weights(tree_is_empty=True)
    store(a, keys, slots(0))
    know_each_other(*(side.storage.stack.remote[Tier.PEER]._sync for side in (a, b)))
    assert b.storage.lookup_leading(keys) == 0


@pytest.fixture
def weights(storages: Storages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Weights:
    return Weights(tmp_path / "model", tmp_path / "b", monkeypatch)


def test_purge_before_weights_are_read_reaches_peers_later(
    open_side: OpenSide, weights: Weights
) -> None:
    """Among servers and in the bucket a purge is of a namespace, which nobody knows yet."""
    a = open_side("a", 7)
    weights.are_read(a.storage)
    keys = hashes("x")
    store(a, keys, slots(0))
    weights.take_long()
    b = open_side("b", None)
    assert not b.storage.knows_namespace
    purge = b.storage.erase(Erasure(tenant=TENANT))
    assert not purge.done()
    assert a.storage.num_kept(keys) == 1
    weights.are_read(b.storage)
    assert is_true(purge, TIMEOUT_S)
    eventually(lambda: a.storage.num_kept(keys) == 0, "not purged")


def test_purge_of_weights_replaced_unread_is_not_done(
    open_side: OpenSide, weights: Weights
) -> None:
    """The name under which others keep their pages will never be known here."""
    weights.take_long()
    b = open_side("b", None)
    assert not b.storage.knows_namespace
    purge = b.storage.erase(Erasure(tenant=None))
    b.storage.change_weights(tree_is_empty=True)
    assert purge.result(TIMEOUT_S) is False
    weights.let_go()
