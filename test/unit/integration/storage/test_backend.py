"""``TieredStorage`` over a real region store, with host pools made of plain tensors."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from host_pools import hashes, make_pool, slots, storage_config
from page_calls import load_pages, queue_store, store_pages
from sglang.srt.mem_cache.hicache_storage import (
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from storages import Storages, Weights

from kit.waiting import eventually
from sglang_tiered.checksummed import seal, unseal
from sglang_tiered.errors import ConfigError, StoreLockedError
from sglang_tiered.flags import MiB
from sglang_tiered.integration.admin.conversations import make_durable
from sglang_tiered.integration.identity import namespace
from sglang_tiered.integration.identity.model import identify_model
from sglang_tiered.integration.identity.namespace_search import NamespaceSearch
from sglang_tiered.integration.identity.tenants import HiddenTenants, key_of_request, tenant_digest
from sglang_tiered.integration.observe.stats import process_stats
from sglang_tiered.integration.storage import backend
from sglang_tiered.integration.storage.backend import TieredStorage
from sglang_tiered.integration.storage.tiers import open_shard
from sglang_tiered.remote_config import PeerConfig
from sglang_tiered.storage.base import Erasure, Tier
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region.format import NAMESPACE_NAME

TIMEOUT_S = 20.0


@pytest.fixture
def make(storages: Storages) -> Storages:
    """With a burst of writes of one region."""
    storages.configure(nvme={"writes_per_day": 40 * MiB})
    return storages


@pytest.mark.parametrize(
    ("policy", "held", "num_trailing", "expected"),
    [
        (PoolHitPolicy.ALL_PAGES, "abcd", 0, (4, [1, 2, 3, 4])),
        (PoolHitPolicy.ALL_PAGES, "abd", 0, (2, [1, 2])),
        (PoolHitPolicy.ALL_PAGES, "", 0, (0, [])),
        (PoolHitPolicy.TRAILING_PAGES, "cd", 2, (4, [4])),
        (PoolHitPolicy.TRAILING_PAGES, "bd", 1, (4, [2, 4])),
        (PoolHitPolicy.TRAILING_PAGES, "ac", 2, (1, [1])),
    ],
)
def test_prefix_ends_where_a_pool_cannot_restore(
    make: Storages,
    policy: PoolHitPolicy,
    held: str,
    num_trailing: int,
    expected: tuple[int, list[int]],
) -> None:
    storage = make.open(make_pool(0), {PoolName.SWA: make_pool(1)})
    keys = hashes(*"abcd")
    store_pages(storage, keys, slots(0, 1, 2, 3))
    if held:
        pages = slots(*range(len(held)))
        store_pages(storage, hashes(*held), pages, PoolName.SWA)
    query = PoolTransfer(PoolName.SWA, keys=keys[-num_trailing:], hit_policy=policy)
    result = storage.batch_exists_v2([*keys, *hashes("e")], [query])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == expected


def test_restart_finds_pages_of_its_geometry_only(make: Storages) -> None:
    store_pages(make.open(make_pool(0)), hashes("a"), slots(0))
    make.close()
    again = make.open(make_pool(0))
    assert again.batch_exists(hashes("a"))
    make.close()
    other = make_pool(0)
    other.page_size = 2
    assert not make.open(other).batch_exists(hashes("a"))


def test_new_weights_store_nothing_before_the_flush(make: Storages) -> None:
    storage = make.open(make_pool(0))
    store_pages(storage, hashes("a"), slots(0))
    storage.change_weights(tree_is_empty=False)
    assert storage.batch_exists(hashes("a")) == 0
    assert store_pages(storage, hashes("a"), slots(0)) == [False]
    queue_store(storage, hashes("b"))
    storage.tree_was_reset()
    assert not storage.gate._stores and not storage.gate._waiting_tokens
    assert store_pages(storage, hashes("a"), slots(0)) == [True]
    assert storage.batch_exists(hashes("a")) == 1


def test_a_tenants_purge_reaches_its_adapters_pages(make: Storages) -> None:
    """And those of which nobody knows whose they are."""
    storage, tenants = make.open(make_pool(0)), HiddenTenants()
    sent = {"a": ("acme", None), "b": ("acme", "0" * 32), "c": ("other", "0" * 32)}
    for slot, (page, (extra_key, lora_id)) in enumerate(sent.items()):
        key = key_of_request(extra_key + (lora_id or ""), lora_id)
        owner = {"tenant": tenants.tenant_of(key, "salt")}
        assert store_pages(storage, hashes(page), slots(slot), **owner) == [True]
    assert store_pages(storage, hashes("d"), slots(3)) == [True]
    assert is_true(storage.erase(Erasure(tenant=tenant_digest("acme", "salt"))), TIMEOUT_S)
    assert [storage.batch_exists(hashes(page)) for page in "abcd"] == [0, 0, 1, 0]


@pytest.mark.parametrize("num_admitted", [0, 2])
def test_dropped_pages_are_answered_false_and_never_touched(
    make: Storages, num_admitted: int
) -> None:
    storage, keys = make.open(make_pool(0)), hashes("a", "b", "c")
    node = queue_store(storage, keys)
    node.num_admitted = num_admitted
    expected = [number < num_admitted for number in range(3)]
    assert store_pages(storage, keys, slots(0, 1, 2), store=node) == expected
    assert process_stats(storage)["nvme"].num_pages_stored == num_admitted
    assert storage.batch_exists(keys) == num_admitted
    assert load_pages(storage, keys, slots(5, 6, 7)) == expected


def test_pages_that_sglang_moves_are_refused(make: Storages) -> None:
    """It would do so while they are read."""
    pool: Any = make_pool(0)
    pool.shared_allocation_domain = object()
    with pytest.raises(ConfigError, match="whose pages SGLang moves"):
        make.open(pool)


def test_replicas_with_equal_ranks_get_own_shards(make: Storages) -> None:
    make.configure(num_ranks=2)
    first, second = make.open(make_pool(0)), make.open(make_pool(0))
    store_pages(first, hashes("a"), slots(0))
    assert first.batch_exists(hashes("a")) and not second.batch_exists(hashes("a"))
    with pytest.raises(StoreLockedError):
        make.open(make_pool(0))


def test_start_without_our_launcher_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_TIERED_CONFIG", raising=False)
    with pytest.raises(ConfigError, match="sglang-tiered serve"):
        TieredStorage(storage_config(), {})


def test_late_stores_of_old_weights_are_not_found(make: Storages, hang: threading.Event) -> None:
    storage, stored = make.open(make_pool(0)), list[bool]()
    storing = threading.Thread(
        target=lambda: stored.extend(store_pages(storage, hashes("a"), slots(0)))
    )
    storing.start()
    eventually(lambda: storage.region_engine.stats().num_inflight_jobs)
    storage.change_weights(tree_is_empty=True)
    storage.clear()
    assert storing.is_alive(), "it waited for the disk"
    hang.set()
    storing.join(TIMEOUT_S)
    assert stored == [True]
    assert storage.batch_exists(hashes("a")) == 0


def test_stores_under_way_never_count_as_new_weights(make: Storages) -> None:
    """The backup thread asks whether to store, and hands over, under one lock."""
    storage, stored = make.open(make_pool(0)), list[bool]()
    storing = threading.Thread(
        target=lambda: stored.extend(store_pages(storage, hashes("a"), slots(0)))
    )

    def waits_for_the_lock() -> bool:
        frame = sys._current_frames().get(storing.ident or 0)
        return frame is not None and frame.f_code.co_name == "begin_store"

    with storage.gate.lock:
        storing.start()
        eventually(waits_for_the_lock)
        storage.change_weights(tree_is_empty=False)
    storing.join(TIMEOUT_S)
    assert stored == [False] and storage.batch_exists(hashes("a")) == 0


# ---- Weights that take long to read ----


@pytest.fixture
def weights(make: Storages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Weights:
    return Weights(tmp_path / "model", tmp_path / "kv", monkeypatch)


def a_run_that_stored_a(make: Storages, weights: Weights) -> None:
    """With these weights, before the restart that a test is about."""
    storage = make.open(make_pool(0))
    weights.are_read(storage)
    store_pages(storage, hashes("a"), slots(0))
    make.close()


@pytest.mark.parametrize("edit", [b"", b"edit"], ids=["same", "edited"])
@pytest.mark.parametrize("is_noted", [True, False])
def test_pages_wait_until_their_weights_are_read(
    make: Storages, weights: Weights, is_noted: bool, edit: bytes
) -> None:
    """``is_noted``: the digests of the run before are remembered, of files with other times."""
    a_run_that_stored_a(make, weights)
    if not is_noted:
        weights.are_forgotten()
    weights.are_fetched_anew(edit)
    weights.take_long()
    pool = make_pool(None)
    storage = make.open(pool)
    keys = hashes("a")
    assert storage.region_engine.stats().num_pages == 1
    assert storage.batch_exists(keys) == 0 and storage.num_kept(keys) == 0
    assert storage.lookup_spans(keys) == [] and set(storage.pages_by_tier(keys).values()) == {0}
    assert storage.batch_exists_v2(keys).kv_hit_pages == 0
    assert load_pages(storage, keys, slots(0)) == [False] and not pool.buffer.any()
    assert make_durable(storage, keys, Tier.NVME, b"t" * 16, work_s=0.0) == 0
    assert not storage.takes_stores and store_pages(storage, hashes("b"), slots(1)) == [False]
    weights.are_read(storage)
    assert load_pages(storage, keys, slots(0)) == [not edit]
    make.close()
    storage = make.open(make_pool(0))
    assert storage.knows_namespace, "they are remembered"
    assert storage.batch_exists(keys) == (not edit)
    assert store_pages(storage, keys, slots(0)) == [True]


def test_what_ran_in_between_costs_no_page(
    make: Storages, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model, or other settings, while a container fetches its weights at every start."""
    a_run_that_stored_a(make, weights)
    identity = namespace.server_identity
    with monkeypatch.context() as other:
        other.setattr(namespace, "server_identity", lambda where: {**identity(where), "set": "on"})
        a_run_that_stored_a(make, weights)
    weights.are_fetched_anew()
    weights.take_long()
    storage = make.open(make_pool(None))
    weights.are_read(storage)
    assert load_pages(storage, hashes("a"), slots(0)) == [True]


@pytest.mark.parametrize("note", [b"", b"x" * 40, seal(b"short"), seal([1])])
def test_a_damaged_namespace_note_costs_pages_only(
    make: Storages, weights: Weights, note: bytes
) -> None:
    storage = make.open(make_pool(0))
    weights.are_read(storage)
    store_pages(storage, hashes("a"), slots(0))
    file = storage.region_engine.directory / NAMESPACE_NAME
    make.close()
    weights.are_forgotten()
    file.write_bytes(note)
    weights.take_long()
    storage = make.open(make_pool(None))
    weights.are_read(storage)
    assert load_pages(storage, hashes("a"), slots(0)) == [False]
    make.close()
    assert unseal(file.read_bytes(), bytes) == storage._namespace


def test_answer_while_opening_does_not_confirm_the_guess(
    make: Storages, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run_that_stored_a(make, weights)
    weights.are_fetched_anew(edit=b"edit")
    weights.take_long()

    searches: list[NamespaceSearch] = []

    def search(*arguments: Any) -> NamespaceSearch:
        searches.append(NamespaceSearch(*arguments))
        return searches[0]

    def open_slowly(*arguments: Any, **more: Any) -> Any:
        opened = open_shard(*arguments, **more)
        assert searches[0].answer is None
        weights.let_go()
        eventually(lambda: searches[0].answer is not None)
        return opened

    monkeypatch.setattr(backend, "NamespaceSearch", search)
    monkeypatch.setattr(backend, "open_shard", open_slowly)
    storage = make.open(make_pool(None))
    assert not storage.knows_namespace
    assert storage.batch_exists(hashes("a")) == 0
    assert load_pages(storage, hashes("a"), slots(0)) == [False]
    storage.settle_namespace()
    assert storage.knows_namespace
    assert load_pages(storage, hashes("a"), slots(0)) == [False]


def test_weights_replaced_unread_get_an_own_namespace(make: Storages, weights: Weights) -> None:
    weights.take_long()
    storage = make.open(make_pool(0))
    storage.change_weights(tree_is_empty=True)
    assert storage.knows_namespace
    assert store_pages(storage, hashes("a"), slots(0)) == [True]
    weights.are_read(storage)
    assert storage.batch_exists(hashes("a"))
    make.close()
    storage = make.open(make_pool(0))
    weights.are_read(storage)
    assert not storage.batch_exists(hashes("a"))


@pytest.fixture
def bucket(make: Storages) -> None:
    """Below NVMe."""
    make.configure(has_bucket=True)


@pytest.mark.usefixtures("bucket")
def test_weights_replaced_unread_leave_the_bucket_bounded(make: Storages, weights: Weights) -> None:
    weights.take_long()
    storage = make.open(make_pool(0))
    assert not num_threads("bucket-collector")
    storage.change_weights(tree_is_empty=True)
    storage.change_weights(tree_is_empty=True)
    assert num_threads("bucket-collector") == 1
    weights.are_read(storage)


def num_threads(name: str) -> int:
    return sum(name in each.name for each in threading.enumerate())


@pytest.mark.usefixtures("bucket")
def test_tiers_that_cannot_all_open_leave_no_thread(
    make: Storages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port for pages is another's, while the bucket is open already."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        peers = PeerConfig(servers=f"127.0.0.1:{port}", host="127.0.0.1", port=port)
        make.configure(has_bucket=True, peers=peers)
        with pytest.raises(ConfigError, match=str(port)):
            make.open(make_pool(None))
        make.close()
    eventually(lambda: not num_threads("bucket"))


@pytest.mark.usefixtures("bucket")
def test_unfindable_pages_stay_out_of_the_bucket(
    make: Storages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a server of their namespace nobody would ever collect them."""
    monkeypatch.setattr(
        namespace, "server_identity", lambda _: {"m": identify_model("m", None, "dummy")}
    )
    storage = make.open(make_pool(0))
    assert store_pages(storage, hashes("a"), slots(0)) == [True]
    assert storage.stack.stack_stats().demote_backlog == 0
    assert storage.stack._demoter._suspended


@pytest.mark.usefixtures("bucket")
def test_pipeline_stage_leaves_memory_alone(make: Storages) -> None:
    """Its stages would hide at different times, and what waits for a scheduler blocks stores."""
    storage = make.open(make_pool(0), pp_size=2)
    assert storage.remote_erasures is None
    store_pages(storage, hashes("a"), slots(0))
    assert is_true(storage.stack._on_told(Erasure(spread=False)), TIMEOUT_S)
    assert storage.batch_exists(hashes("a")) == 0


@pytest.mark.usefixtures("bucket")
def test_pages_are_demoted_under_the_namespace_read(make: Storages, weights: Weights) -> None:
    weights.take_long()
    storage = make.open(make_pool(0))
    assert storage.stack.bucket._collector is None, "it would collect for nobody"
    weights.are_read(storage)
    assert storage.stack.bucket._collector is not None
    assert storage.stack.bucket.namespace == storage._namespace
    keys = hashes("a")
    store_pages(storage, keys, slots(0))
    assert make_durable(storage, keys, Tier.OBJECT, b"t" * 16, work_s=TIMEOUT_S) == 1
    eventually(lambda: storage.stack.stack_stats().num_demoted > 0, timeout_s=TIMEOUT_S)


def test_closing_does_not_wait_for_weights(make: Storages, weights: Weights) -> None:
    weights.take_long()
    make.open(make_pool(0))
    with pytest.raises(StoreLockedError):
        make.open(make_pool(0))
    make.close()
    assert "tier-weights" not in [thread.name for thread in threading.enumerate()]


# ---- Pages of 16 and 32 MiB ----


LARGE = {"capacity_bytes": 640 * MiB, "region_bytes": 32 * MiB}


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ({"capacity_bytes": 64 * MiB}, "--tier-nvme-bytes leaves a rank 64MiB"),
        ({"tenant_share": 0.1}, "--tier-tenant-share leaves a rank 64MiB"),
        ({"writes_per_day": 320 * MiB}, "--tier-nvme-writes-per-day leaves a rank 320MiB"),
    ],
)
def test_a_tier_too_small_for_pages_is_refused(
    storages: Storages, bounds: dict[str, Any], says: str
) -> None:
    storages.configure(nvme={**LARGE, **bounds})
    pool = make_pool(None, page_bytes=16 * MiB, num_pages=1)
    with pytest.raises(ConfigError, match=f"{says}, which is too small for pages of 32MiB"):
        storages.open(pool)
