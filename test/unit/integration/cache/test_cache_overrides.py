"""What the cache tells its parts and the books of host memory, at SGLang's own calls."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.buffer_mode.storage_existence_cache import StorageExistenceCache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_tiered.integration.cache.quiescing import LoadsUnderWay
from sglang_tiered.integration.cache.radix_cache import TieredRadixCache
from sglang_tiered.integration.cache.tiering import Tiering
from sglang_tiered.integration.identity.tenants import HiddenPages, HiddenTenants, tenant_digest
from sglang_tiered.integration.storage.controller import NextStore
from sglang_tiered.policy.admission import Outcome
from sglang_tiered.policy.cost_model import CostModel
from sglang_tiered.policy.page_accounting import EvictionOutcome as Left
from sglang_tiered.policy.page_accounting import PageAccounting, store_outcomes

PAGE = 4


def slots(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


class Parts(SimpleNamespace):
    """Stands for ``Tiering``: notes what it is told."""

    def __init__(self, backed_up: set[int]) -> None:
        super().__init__(offered=[], attempted=[], num_ends=0, resets=0)
        self._backed_up = backed_up
        self.copies = SimpleNamespace(attempted=self.attempted.append, copied=lambda: None)
        self.loads = SimpleNamespace(ended=lambda request, num_loaded: None)
        self.returns = SimpleNamespace(arrived=lambda operation: False)

    def offer_store(self, node_id: int) -> bool:
        if node_id in self._backed_up:
            self.offered.append(node_id)
        return node_id in self._backed_up

    def stores_ended(self) -> None:
        self.num_ends += 1

    def tree_was_reset(self) -> None:
        self.resets += 1


UPSTREAM = (
    *("write_backup_storage", "_execute_and_commit_kv_backup", "_execute_kv_backup"),
    *("_handle_prefetch_result", "_drain_host_frees", "_drain_storage_control_queues_impl"),
    *("_record_dropped_tokens", "reset"),
)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cache over stand-ins for SGLang's methods, which answer as ``made.upstream`` says."""
    upstream: dict[str, Any] = {}
    held: set[str] = set()
    storage = SimpleNamespace(
        accounting=PageAccounting(16 * PAGE, PAGE),
        tree_was_reset=lambda: None,
        holds=held.__contains__,
        takes_stores=True,
        counts_pages=True,
    )
    monkeypatch.setattr(TieredRadixCache, "storage", storage)
    for name in UPSTREAM:

        def method(self: Any, *args: Any, name: str = name, **kwargs: Any) -> Any:
            answer = upstream.get(name)
            return answer(*args, **kwargs) if callable(answer) else answer

        monkeypatch.setattr(UnifiedRadixCache, name, method)
    cache: Any = TieredRadixCache.__new__(TieredRadixCache)
    cache.__dict__.update(
        tiering=Parts({1, 2}),
        decides_alone=True,
        pp_size=1,
        hidden_tenants=HiddenTenants(),
        hidden_pages=HiddenPages(),
        _clean={},
        _loads_under_way=LoadsUnderWay(),
        promised={},
        storage_existence_cache=StorageExistenceCache(),
        cache_controller=SimpleNamespace(
            prefetch_hit_queue=queue.Queue(), ack_prefetch_queue=queue.Queue()
        ),
        tree_core=SimpleNamespace(prefetch_anchor_info=lambda node: ("acme", None)),
        ongoing_backup={},
    )
    return SimpleNamespace(
        cache=cache, storage=storage, parts=cache.tiering, held=held, upstream=upstream
    )


def left(made: Any) -> dict[Left, int]:
    return {outcome: count for outcome, count in made.storage.accounting.left.items() if count}


def free(made: Any, *pages: int) -> None:
    made.cache._drain_host_frees({ComponentType.FULL: [slots(page) for page in pages]})


def test_node_without_host_copy_is_left_to_sglang(made: Any) -> None:
    declined: list[int] = []
    made.upstream["write_backup_storage"] = declined.append
    made.cache.write_backup_storage(1)
    made.cache.write_backup_storage(9)
    assert made.parts.offered == [1] and declined == [9]


def test_store_has_the_operation_that_sglang_began(made: Any) -> None:
    made.cache.ongoing_backup[5] = "earlier"
    assert made.cache.begin_store(1, 64) is None
    made.upstream["write_backup_storage"] = lambda node: made.cache.ongoing_backup.update({7: node})
    assert made.cache.begin_store(1, 64) == 7
    expected = NextStore(tenant_digest("acme", None), 64)
    assert made.cache.cache_controller.next_store == expected


def test_only_the_end_of_a_store_is_told(made: Any) -> None:
    noted: list[int] = []
    made.cache._observer = SimpleNamespace(announce_node=noted.append)
    made.cache.ongoing_backup.update({5: (50, None), 6: (60, None)})
    made.cache._drain_storage_control_queues_impl(0, 0, 1)
    assert made.parts.num_ends == 0 and noted == []
    made.upstream["_drain_storage_control_queues_impl"] = lambda *_: made.cache.ongoing_backup.pop(
        5
    )
    made.cache._drain_storage_control_queues_impl(0, 0, 1)
    assert made.parts.num_ends == 1 and noted == [50]


@pytest.mark.parametrize(("write_back", "told"), [(False, [9]), (True, [])])
def test_copy_that_sglang_attempts_is_looked_at(
    made: Any, write_back: bool, told: list[int]
) -> None:
    made.cache._execute_and_commit_kv_backup(SimpleNamespace(node_ids=[1, 9]), write_back)
    assert made.parts.attempted == told


def test_page_written_and_freed_unstored_is_lost(made: Any) -> None:
    made.upstream["_execute_kv_backup"] = slots(3, 1)
    made.cache._execute_kv_backup(1, None, {}, [])
    made.upstream["_execute_kv_backup"] = None  # host memory was short
    made.cache._execute_kv_backup(1, None, {}, [])
    assert made.storage.accounting.num_dirty == 2
    free(made, 1, 3)
    assert left(made) == {Left.LOST_WAITING: 2}


def test_pools_of_other_components_are_not_kv_pages(made: Any) -> None:
    made.cache._drain_host_frees({ComponentType.SWA: [slots(1)]})
    assert left(made) == {}


@pytest.mark.parametrize(
    ("ok", "num_admitted", "why", "expected"),
    [
        ([True, False], 2, Outcome.ADMITTED, {Left.CLEAN: 1, Left.LOST_FAILED: 1}),
        ([True, False], 1, Outcome.DROPPED_BUDGET, {Left.CLEAN: 1, Left.LOST_BUDGET: 1}),
        ([False, False], 0, Outcome.DROPPED_BACKLOG, {Left.LOST_BACKLOG: 2}),
        ([False, False], 0, Outcome.DROPPED_FIRST_TOUCH, {Left.LOST_FIRST_TOUCH: 2}),
        ([False, False], 0, None, {Left.LOST_WEIGHTS: 2}),
    ],
)
def test_page_is_lost_for_its_stores_reason(
    made: Any,
    ok: Sequence[bool],
    num_admitted: int,
    why: Outcome | None,
    expected: dict[Left, int],
) -> None:
    made.storage.accounting.note_written(slots(4, 5))
    made.storage.accounting.note_stored(slots(4, 5), store_outcomes(ok, num_admitted, why))
    free(made, 4, 5)
    assert left(made) == expected


def test_only_loaded_pages_in_the_tree_are_clean(made: Any) -> None:
    operation = SimpleNamespace(handle="request", completed_tokens=3 * PAGE)
    made.cache.ongoing_prefetch = {"request": SimpleNamespace(host_indices=slots(1, 2, 3, 4))}
    loaded: dict[str, int] = {"request": 99}
    made.cache.prefetch_loaded_tokens_by_reqid = loaded
    made.upstream["_handle_prefetch_result"] = lambda operation: loaded.update(request=2 * PAGE)
    made.cache._handle_prefetch_result(operation)
    free(made, 2, 3)
    assert left(made) == {Left.CLEAN: 2}
    made.upstream["_handle_prefetch_result"] = None  # nothing came of it
    made.cache._handle_prefetch_result(operation)
    assert made.storage.accounting.num_dirty == 0


def test_kv_evicted_without_host_copy_is_counted(made: Any) -> None:
    made.cache._record_dropped_tokens(3 * PAGE, reason="write_through_unbacked_eviction")
    made.cache._record_dropped_tokens(0, reason="write_through_unbacked_eviction")
    assert left(made) == {Left.LOST_HOST_SHORT: 3}


def test_reset_empties_parts_and_books(made: Any) -> None:
    made.storage.accounting.note_written(slots(1))
    made.cache.reset()
    assert made.parts.resets == 1 and left(made) == {Left.LOST_FLUSHED: 1}


def test_chain_on_the_disk_costs_a_load(made: Any) -> None:
    """Or is about to have it; else a prefill."""
    costs = CostModel(page_tokens=PAGE, bytes_per_token=1)
    under_way: set[int] = set()
    tiering: Any = Tiering.__new__(Tiering)
    tiering._cache, tiering.planner = made.cache, SimpleNamespace(costs=costs)
    tiering.stores = SimpleNamespace(queue=SimpleNamespace(is_under_way=under_way.__contains__))
    load = costs.load_seconds((4096,)) / 4096
    prefill = costs.prefill.seconds(4096, 0) / 4096
    assert load < prefill
    assert tiering.cost_to_bring_back(1, "chain", 4096) == pytest.approx(prefill)
    made.held.add("chain")
    assert tiering.cost_to_bring_back(1, "chain", 4096) == pytest.approx(load)
    under_way.add(1)
    assert tiering.cost_to_bring_back(1, "other", 4096) == pytest.approx(load)
    made.cache.decides_alone = False
    assert tiering.cost_to_bring_back(2, "other", 4096) == 1.0
