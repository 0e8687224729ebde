"""What the cache tells the spiller and the books of host memory, at SGLang's own calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_tiered.integration.cache import spilling_cache
from sglang_tiered.integration.cache.quiescing import QuiescingRadixCache
from sglang_tiered.integration.cache.spilling_cache import SpillingRadixCache
from sglang_tiered.integration.storage.page_accounting import HostLedger
from sglang_tiered.policy.admission import Outcome
from sglang_tiered.policy.cost_model import CostModel
from sglang_tiered.policy.page_accounting import Fate

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = 4


def slots(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


class Storage(SimpleNamespace):
    """An attached tier: its books, and what it holds."""

    def __init__(self) -> None:
        super().__init__(ledger=HostLedger.of_pool(16 * PAGE, PAGE))
        self.held: set[str] = set()
        self.takes_stores = True

    def holds(self, chain: str) -> bool:
        return chain in self.held


class Spiller:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.offered: list[int] = []
        self.skipped: list[int] = []
        self.cleared = False
        self.num_ends = 0
        self.under_way: set[int] = set()

    def offer(self, node_id: int, storage: Storage) -> None:
        self.offered.append(node_id)

    def backup_skipped(self, node_id: int) -> None:
        self.skipped.append(node_id)

    def stores_ended(self) -> None:
        self.num_ends += 1

    def step(self, storage: Storage | None) -> None:
        pass

    def clear(self) -> None:
        self.cleared = True

    def is_under_way(self, node_id: int) -> bool:
        return node_id in self.under_way

    def waiting(self) -> set[int]:
        return self.under_way


class Made(SimpleNamespace):
    cache: Any
    clock: Clock
    storage: Storage
    spiller: Spiller
    backed_up: set[int]
    upstream: dict[str, Any]  # what SGLang's methods answer


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """A cache over stand-ins for SGLang's methods, which answer as the test says."""
    upstream: dict[str, Any] = {}
    storage, spiller, backed_up = Storage(), Spiller(), {1, 2}
    monkeypatch.setattr(SpillingRadixCache, "storage", storage)
    for name in (
        "write_backup_storage",
        "_execute_and_commit_kv_backup",
        "_execute_kv_backup",
        "_handle_prefetch_result",
        "_drain_host_frees",
        "_drain_storage_control_queues_impl",
        "_record_dropped_tokens",
        "check_hicache_events",
        "pop_prefetch_loaded_span",
        "release_aborted_request",
        "reset",
    ):

        def method(self: Any, *args: Any, name: str = name, **kwargs: Any) -> Any:
            answer = upstream.get(name)
            return answer(*args, **kwargs) if callable(answer) else answer

        monkeypatch.setattr(QuiescingRadixCache, name, method)
    cache: Any = SpillingRadixCache.__new__(SpillingRadixCache)
    cache._spiller = spiller
    cache.tp_world_size, cache.pp_size = 1, 1
    cache.tree_core = SimpleNamespace(is_backuped=lambda node: node in backed_up, page_size=PAGE)
    cache.ongoing_backup = {}
    cache.ongoing_write_through = {}
    cache._stores_on_device = {}
    cache._waits_for_room = {}
    cache._loading_keys, cache._loaded = {}, {}
    return Made(
        cache=cache, storage=storage, spiller=spiller, backed_up=backed_up, upstream=upstream
    )


def left(made: Made) -> dict[Fate, int]:
    return {fate: count for fate, count in made.storage.ledger.fates.left.items() if count}


def free(made: Made, *pages: int) -> None:
    made.cache._drain_host_frees({ComponentType.FULL: [slots(page) for page in pages]})


def test_store_goes_to_the_spiller_and_a_node_without_host_copy_to_sglang(made: Made) -> None:
    declined: list[int] = []
    made.upstream["write_backup_storage"] = declined.append
    made.cache.write_backup_storage(1)
    made.cache.write_backup_storage(9)
    assert made.spiller.offered == [1] and declined == [9]


def test_operation_of_a_queued_store_is_the_one_sglang_began(made: Made) -> None:
    made.cache.ongoing_backup[5] = "earlier"
    assert made.cache.queue_store(1) is None
    made.upstream["write_backup_storage"] = lambda node: made.cache.ongoing_backup.update({7: node})
    assert made.cache.queue_store(1) == 7


def test_store_of_a_node_whose_host_copy_is_under_way_is_left_to_the_end_of_the_copy(
    made: Made,
) -> None:
    made.upstream["write_backup_storage"] = lambda node: made.cache.ongoing_backup.update({7: node})
    made.cache.ongoing_write_through[2] = SimpleNamespace(publish_node_ids=[1, 2])
    assert made.cache.queue_store(1) is None and not made.cache.ongoing_backup
    made.cache.ongoing_write_through.clear()
    assert made.cache.queue_store(1) == 7


def test_end_of_a_store_is_told_to_the_spiller_of_a_small_host_tier_and_nothing_else_is(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that found no room wait for it. In a large one each try evicts what is kept."""
    monkeypatch.setattr(SpillingRadixCache, "has_small_host", True)
    made.cache.ongoing_backup.update({5: "a store", 6: "another"})
    made.cache._drain_storage_control_queues_impl()
    assert made.spiller.num_ends == 0
    drain = "_drain_storage_control_queues_impl"
    made.upstream[drain] = lambda: made.cache.ongoing_backup.pop(5)
    made.cache._drain_storage_control_queues_impl()
    assert made.spiller.num_ends == 1
    monkeypatch.setattr(SpillingRadixCache, "has_small_host", False)
    made.upstream[drain] = made.cache.ongoing_backup.clear
    made.cache._drain_storage_control_queues_impl()
    assert made.spiller.num_ends == 1


class Clock:
    """Stands in for the ``time`` module."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def small(made: Made, monkeypatch: pytest.MonkeyPatch) -> Made:
    """With a small host tier of 100 tokens, of which loads take 10; nodes have 20."""
    cache = made.cache
    monkeypatch.setattr(SpillingRadixCache, "has_small_host", True)
    made.clock = Clock()
    monkeypatch.setattr(spilling_cache, "time", made.clock)
    cache._planner = SimpleNamespace(patience_s=lambda request: 3.0)
    cache.cache_controller = SimpleNamespace(
        mem_pool_host=SimpleNamespace(logical_size=100), prefetch_tokens_occupied=10
    )
    cache.prefetch_loaded_tokens_by_reqid, cache.ongoing_prefetch = {}, {}
    cache.tree_core.num_tokens = lambda nodes: 20 * len(set(nodes))
    cache.ongoing_write_through[1] = SimpleNamespace(publish_node_ids=[1])
    cache.ongoing_backup[7] = 2, None
    made.spiller.under_way = {3}
    return made


def test_load_waits_until_the_copies_that_must_stay_leave_it_room(small: Made) -> None:
    """One that began at once would find no room, and all of its prompt would be computed."""
    cache = small.cache
    assert cache.stores_in_the_way("small", 30) == 0  # there is room beside them
    assert cache.stores_in_the_way("cold", 0) == 0 and not cache.lets_loads_go_first
    assert cache.stores_in_the_way("ours", 60) == 30
    assert cache.stores_in_the_way("longer than host memory", 1_000) == 60
    assert cache.lets_loads_go_first
    small.upstream["_drain_storage_control_queues_impl"] = cache.ongoing_backup.clear
    cache._drain_storage_control_queues_impl()
    assert cache.stores_in_the_way("ours", 60) == 10
    small.spiller.under_way.clear()
    cache.check_hicache_events()
    assert cache.stores_in_the_way("ours", 60) == 0


@pytest.mark.parametrize("why", ["time", "a sick disk", "detached", "several ranks"])
def test_load_does_not_wait_for_room_for_ever(
    small: Made, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may hang, or new copies may come as fast as others go."""
    cache = small.cache
    assert cache.stores_in_the_way("ours", 60) == 30
    if why == "time":
        small.clock.now += 3.0
    elif why == "a sick disk":
        small.storage.takes_stores = False
    elif why == "detached":
        monkeypatch.setattr(SpillingRadixCache, "storage", None)
    else:
        cache.tp_world_size = 2
    assert cache.stores_in_the_way("ours", 60) == 0
    assert cache.stores_in_the_way("ours", 1_000) == 0
    if why == "time":
        assert not cache.lets_loads_go_first
        assert cache.stores_in_the_way("another", 60) == 30


def test_skipped_copies_leave_the_room_until_the_load_has_taken_it(small: Made) -> None:
    """The stores' end brings the room, and the load is asked for a step or two later."""
    cache = small.cache
    assert cache.stores_in_the_way("ours", 60) == 30
    cache.ongoing_backup.clear()
    cache.ongoing_write_through.clear()
    small.spiller.under_way.clear()
    cache.check_hicache_events()
    assert cache.stores_in_the_way("ours", 60) == 0 and cache.lets_loads_go_first
    load = SimpleNamespace(host_indices=None)
    cache.ongoing_prefetch["ours"] = SimpleNamespace(operation=load)
    cache.check_hicache_events()
    assert cache.lets_loads_go_first
    load.host_indices = slots(0)
    cache.check_hicache_events()
    assert not cache.lets_loads_go_first


@pytest.mark.parametrize("end", ["pop_prefetch_loaded_span", "release_aborted_request"])
def test_nothing_is_kept_of_a_load_that_waited(small: Made, end: str) -> None:
    assert small.cache.stores_in_the_way("ours", 60) == 30
    small.cache._planner.leaves = lambda request: None
    small.cache._window = small.cache.agreement = None
    getattr(small.cache, end)("ours")
    assert not small.cache._waits_for_room and not small.cache.lets_loads_go_first


@pytest.mark.parametrize(
    ("last", "write_back", "noted"), [(9, False, 1), (9, True, 0), (2, False, 0)]
)
def test_skipped_host_copy_is_noted(made: Made, last: int, write_back: bool, noted: int) -> None:
    action = SimpleNamespace(node_ids=[1, last])
    made.cache._execute_and_commit_kv_backup(action, write_back)
    assert made.spiller.skipped == [last] * noted
    assert made.storage.ledger.num_backups_skipped == noted


def test_retry_of_a_host_copy_is_not_counted_as_skipped_again(made: Made) -> None:
    made.cache.tree_core.build_backup_kv_action = lambda node: SimpleNamespace(node_ids=[node])
    assert not made.cache.back_up(9)
    assert made.spiller.skipped == [] and made.storage.ledger.num_backups_skipped == 0


def test_page_written_and_freed_unstored_is_lost(made: Made) -> None:
    made.upstream["_execute_kv_backup"] = slots(3, 1)
    made.cache._execute_kv_backup(1, None, {}, [])
    made.upstream["_execute_kv_backup"] = None  # host memory was short
    made.cache._execute_kv_backup(1, None, {}, [])
    assert made.storage.ledger.fates.num_dirty == 2
    free(made, 1, 3)
    assert left(made) == {Fate.LOST_WAITING: 2}


def test_pools_of_other_components_are_not_kv_pages(made: Made) -> None:
    made.cache._drain_host_frees({ComponentType.SWA: [slots(1)]})
    assert left(made) == {}


@pytest.mark.parametrize(
    ("ok", "num_admitted", "why", "expected"),
    [
        ([True, False], 2, Outcome.ADMITTED, {Fate.CLEAN: 1, Fate.LOST_FAILED: 1}),
        ([True, False], 1, Outcome.DROPPED_BUDGET, {Fate.CLEAN: 1, Fate.LOST_BUDGET: 1}),
        ([False, False], 0, Outcome.DROPPED_BACKLOG, {Fate.LOST_BACKLOG: 2}),
        ([False, False], 0, Outcome.DROPPED_FIRST_TOUCH, {Fate.LOST_FIRST_TOUCH: 2}),
        ([False, False], 0, None, {Fate.LOST_WEIGHTS: 2}),
    ],
)
def test_page_is_lost_for_the_reason_its_store_ended_with(
    made: Made,
    ok: Sequence[bool],
    num_admitted: int,
    why: Outcome | None,
    expected: dict[Fate, int],
) -> None:
    made.storage.ledger.written(slots(4, 5))
    made.storage.ledger.stored(slots(4, 5), ok, num_admitted, why)
    free(made, 4, 5)
    assert left(made) == expected


def test_loaded_pages_that_the_tree_took_are_clean_and_its_duplicates_no_pages(made: Made) -> None:
    operation = SimpleNamespace(handle="request", completed_tokens=3 * PAGE)
    made.cache.ongoing_prefetch = {"request": SimpleNamespace(host_indices=slots(1, 2, 3, 4))}
    loaded: dict[str, int] = {"request": 99}
    made.cache.prefetch_loaded_tokens_by_reqid = loaded
    made.upstream["_handle_prefetch_result"] = lambda operation: loaded.update(request=2 * PAGE)
    made.cache._handle_prefetch_result(operation)
    free(made, 2, 3)
    assert left(made) == {Fate.CLEAN: 2}
    made.upstream["_handle_prefetch_result"] = None  # nothing came of it
    made.cache._handle_prefetch_result(operation)
    assert made.storage.ledger.fates.num_dirty == 0


def test_kv_evicted_from_the_device_without_host_copy_is_counted(made: Made) -> None:
    made.cache._record_dropped_tokens(3 * PAGE, reason="write_through_unbacked_eviction")
    made.cache._record_dropped_tokens(0, reason="write_through_unbacked_eviction")
    assert left(made) == {Fate.LOST_HOST_SHORT: 3}


def test_reset_empties_spiller_and_books(made: Made) -> None:
    made.storage.ledger.written(slots(1))
    made.cache.reset()
    assert made.spiller.cleared and left(made) == {Fate.LOST_FLUSHED: 1}


def test_chain_costs_a_load_if_the_disk_has_it_or_is_about_to_and_else_a_prefill(
    made: Made,
) -> None:
    costs = CostModel(page_tokens=PAGE, bytes_per_token=1)
    made.cache._planner = SimpleNamespace(costs=costs)
    load = costs.load_seconds((4096,)) / 4096
    prefill = costs.prefill.seconds(4096, 0) / 4096
    assert load < prefill
    assert made.cache.cost_to_bring_back(1, "chain", 4096) == pytest.approx(prefill)
    made.storage.held.add("chain")
    assert made.cache.cost_to_bring_back(1, "chain", 4096) == pytest.approx(load)
    made.spiller.under_way.add(1)
    assert made.cache.cost_to_bring_back(1, "other", 4096) == pytest.approx(load)
    made.cache.tp_world_size = 2
    assert made.cache.cost_to_bring_back(2, "other", 4096) == 1.0
