"""The spiller over SGLang's own tree, where nodes are split, evicted and created again."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.utils import get_storage_hash_str

from kit.clock import Clock
from kit.memory import MemoryEngine
from sglang_tiered.integration.cache.host_copies import HostCopies
from sglang_tiered.integration.cache.loads import Loads
from sglang_tiered.integration.cache.spiller import RETRY_S, STORES_S_PER_STEP, Spiller
from sglang_tiered.integration.cache.tiering import Tiering
from sglang_tiered.integration.storage.admission_gate import QueuedStore, StoreGate
from sglang_tiered.policy.admission import LONG_PREFIX_TOKENS, Level, Outcome
from sglang_tiered.policy.page_accounting import EvictionOutcome, PageAccounting, store_outcomes
from sglang_tiered.policy.shares import HostBudget
from sglang_tiered.policy.spill import MAX_HOLD_S
from sglang_tiered.storage.base import Run, Stop

PAGE = 64
HOST_PAGES = 1 << 12


class Tier:
    """A host tier over a real tree; its cache's bookkeeping, and a disk that works when told.

    Stands for ``TieredRadixCache`` where the spiller asks one: locks and stores are SGLang's and
    the engine's, what is left out is device memory.
    """

    def __init__(
        self, *, alone: bool = True, writes_per_day: int | None = None, store_s: float = 0.0
    ) -> None:
        self.clock = Clock()
        self._store_s = store_s  # of the scheduler's time
        params: Any = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
        )
        self.tree_components = params.tree_components
        self.tree_core = RustUnifiedTreeCore(params)
        self.tree_core.set_hicache_enabled()
        self.tree_core.enable_storage = True
        self.decides_alone = alone
        self.has_small_host = False
        self.is_erased = lambda node_id: False
        self.ongoing_write_through: dict[int, Any] = {}
        self.tenant_of = lambda node_id: b"a" * 16
        self.ongoing_backup: dict[int, tuple[int, Any]] = {}
        self.ongoing_prefetch: dict[str, object] = {}
        self.queued: list[tuple[int, QueuedStore, torch.Tensor]] = []
        self.num_queued: list[int] = []  # nodes, in the order they were queued
        self.engine = MemoryEngine(1 << 20)
        self.accounting = PageAccounting(HOST_PAGES * PAGE, PAGE)
        self.is_healthy = True
        self.ended: list[tuple[int, bool]] = []
        self.gate = StoreGate(
            self.engine,
            host_tokens=HOST_PAGES * PAGE,
            page_bytes=100,
            writes_per_day=writes_per_day,
            clock=self.clock,
        )
        self.free_pages = list(range(HOST_PAGES))
        cache: Any = self
        self.copies = HostCopies(
            cache, Loads(), patience_s=lambda request: 0.0, waiting_stores=list, clock=self.clock
        )
        self.spiller = Spiller(
            cache,
            self.copies,
            HostBudget(HOST_PAGES * PAGE, 0),
            num_loading=lambda: 0,
            store_ended=lambda chain, num_tokens, is_held: self.ended.append((num_tokens, is_held)),
            clock=self.clock,
        )

    # What the spiller asks of the cache.

    def inc_host_lock_ref(self, node_id: int) -> Any:
        return self.tree_core.inc_host_lock_ref(node_id)

    def dec_host_lock_ref(self, node_id: int, lock: Any) -> None:
        self.tree_core.dec_host_lock_ref(node_id, lock)

    def begin_store(self, node_id: int, chain_tokens: int) -> int | None:
        spec = self.tree_core.build_storage_backup_spec(node_id, False)
        if spec is None:
            return None
        self.clock.now += self._store_s
        operation = len(self.num_queued)
        self.num_queued.append(node_id)
        store = self.gate.queue_store(
            list(spec.hash_value), num_tokens=len(spec.host_value), prefix_tokens=chain_tokens
        )
        self.queued.append((operation, store, spec.host_value))
        lock = self.inc_host_lock_ref(node_id).to_dec_params()
        self.ongoing_backup[operation] = (node_id, lock)
        return operation

    # What it asks of the storage class.

    @property
    def takes_stores(self) -> bool:
        return self.is_healthy

    def holds(self, page_hash: str) -> bool:
        return self.engine.lookup([bytes.fromhex(page_hash)]).stop in (Stop.END, Stop.PENDING)

    def num_kept(self, hashes: Sequence[str]) -> int:
        return self.engine.lookup([bytes.fromhex(text) for text in hashes]).num_hits

    # What happens to it.

    def insert(self, tokens: Sequence[int], *, offer: bool = True) -> int:
        """A chain gets into host memory; the node that ends it."""
        key = RadixKey(array("q", tokens), None)
        pages = [self.free_pages.pop() for _ in range(len(tokens) // PAGE)]
        slots = torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])
        hashes = get_storage_hash_str(key, None, page_size=PAGE)
        root = self.tree_core.root_node_handle()
        result = self.tree_core.insert_host(root, key, slots, hashes)
        num_known = result.prefix_len // PAGE
        self.free_pages += pages[:num_known]
        if num_known < len(pages):
            self.accounting.note_written(slots[result.prefix_len :])
            if offer:
                self.spiller.offer_node(result.inserted_host_node, self)  # type: ignore[arg-type]
        return int(result.inserted_host_node)

    def work(self, number: int | None = None) -> None:
        """The storage thread carries out stores, and SGLang takes their results."""
        number = len(self.queued) if number is None else number
        for operation, store, slots in self.queued[:number]:
            hashes = store.hashes
            admitted = self.gate.num_admitted(store, hashes)
            ok: list[bool] = []
            if admitted:
                keys = tuple(bytes.fromhex(text) for text in hashes[:admitted])
                run = Run(keys, tuple((memoryview(bytearray(100)),) for _ in keys))
                ok = self.engine.submit_store(run).ok
            ok += [False] * (len(hashes) - admitted)
            self.gate.store_ended(store)
            outcomes = store_outcomes(ok, admitted, store.dropped_as)
            self.accounting.note_stored(slots, outcomes)
            node_id, lock = self.ongoing_backup.pop(operation)
            self.dec_host_lock_ref(node_id, lock)
        del self.queued[:number]

    def step(self) -> None:
        self.spiller.step(self)  # type: ignore[arg-type]

    def run(self, steps: int = 50) -> None:
        for _ in range(steps):
            self.step()
            self.work()

    def evict(self, num_tokens: int = HOST_PAGES * PAGE) -> int:
        result = self.tree_core.drive_host_eviction(ComponentType.FULL, num_tokens)
        freed = 0
        for slots in result.host_frees.pop(ComponentType.FULL, ()):
            self.accounting.note_freed(slots)
            freed += len(slots)
            self.free_pages += [int(slot) // PAGE for slot in slots[::PAGE]]
        result.cache_actions.clear()
        return freed

    def stored_of(self, tokens: Sequence[int]) -> int:
        key = RadixKey(array("q", tokens), None)
        return self.num_kept(get_storage_hash_str(key, None, page_size=PAGE))


def chain(seed: int, num_pages: int, shared: int = 0) -> list[int]:
    """Tokens of a chain whose first ``shared`` pages are the same for all."""
    own = random.Random(seed)
    tokens = [own.randrange(1000) for _ in range(num_pages * PAGE)]
    common = random.Random(0)
    tokens[: shared * PAGE] = [common.randrange(1000) for _ in range(shared * PAGE)]
    return tokens


def test_idle_disk_gets_a_node_at_once() -> None:
    tier = Tier()
    node = tier.insert(chain(1, 4))
    assert tier.num_queued == []
    assert tier.spiller.queue.is_under_way(node)
    tier.step()
    assert tier.num_queued == [node] and tier.spiller.queue.is_under_way(node)
    tier.work()
    tier.step()
    assert not tier.spiller.queue.is_under_way(node) and tier.ended == []
    assert tier.stored_of(chain(1, 4)) == 4
    assert tier.evict() == 4 * PAGE  # nothing is pinned any more
    assert tier.accounting.left[EvictionOutcome.CLEAN] == 4


def test_several_ranks_queue_stores_at_once_unpinned() -> None:
    tier = Tier(alone=False)
    nodes = [tier.insert(chain(seed, 4)) for seed in range(20)]
    assert tier.num_queued == nodes
    tier.work()
    tier.step()
    assert tier.evict() == 20 * 4 * PAGE


def test_step_hands_over_no_more_than_its_share() -> None:
    tier = Tier(store_s=STORES_S_PER_STEP / 4)
    for seed in range(10):
        tier.insert(chain(seed, 1))
    tier.step()
    assert len(tier.num_queued) == 4
    tier.run()
    assert len(tier.num_queued) == 10


def test_slow_store_leaves_the_others_their_turn() -> None:
    """One store takes longer than a step may; the next step begins the next."""
    tier = Tier(store_s=3 * STORES_S_PER_STEP)
    for seed in range(3):
        tier.insert(chain(seed, 1))
    for number in range(1, 4):
        tier.run()
        assert len(tier.num_queued) >= number


def test_node_split_while_waiting_is_stored_whole() -> None:
    tier = Tier()
    tier.insert(chain(1, 8, shared=4))
    tier.insert(chain(2, 8, shared=4))  # splits it at page 4
    tier.insert(chain(3, 3, shared=2))  # splits the prefix at page 2
    tier.run()
    for seed, num_pages, shared in ((1, 8, 4), (2, 8, 4), (3, 3, 2)):
        assert tier.stored_of(chain(seed, num_pages, shared)) == num_pages
    assert tier.evict() == (8 + 4 + 1) * PAGE
    assert tier.accounting.left[EvictionOutcome.CLEAN] == 13


def test_prefix_of_a_split_node_is_offered() -> None:
    tier = Tier(writes_per_day=100_000)
    exhaust(tier)
    tier.is_healthy = False
    node = tier.insert(chain(1, 8, shared=4))
    prefix_of = tier.insert(chain(2, 4, shared=2))  # splits it at page 2
    prefix = tier.tree_core.collect_path_info([prefix_of])[0][0].node_id
    tier.is_healthy = True
    tier.gate._admission.level = Level.SELECTIVE
    num_before = len(tier.num_queued)
    tier.run()
    assert tier.num_queued[num_before:] == [prefix, node, prefix_of]


def test_waiting_node_outlives_clean_ones() -> None:
    tier = Tier()
    tier.insert(chain(1, 4))
    tier.run()
    tier.is_healthy = False
    tier.insert(chain(2, 4))
    assert tier.evict() == 4 * PAGE
    assert tier.accounting.left[EvictionOutcome.CLEAN] == 4 and tier.accounting.num_dirty == 4


def test_node_evicted_while_waiting_is_counted() -> None:
    tier = Tier()
    tier.is_healthy = False
    tier.insert(chain(1, 4))
    while tier.spiller.release_pin():
        pass
    assert tier.evict() == 4 * PAGE
    assert tier.accounting.left[EvictionOutcome.LOST_WAITING] == 4
    tier.is_healthy = True
    node = tier.insert(chain(1, 4))  # the same content, another node
    tier.run()
    assert tier.num_queued == [node] and tier.stored_of(chain(1, 4)) == 4


def test_too_many_dirty_nodes_leave_room_to_evict() -> None:
    tier = Tier()
    tier.is_healthy = False
    for seed in range(12):
        tier.insert(chain(seed, 256))
    pinned = tier.spiller.queue.pinned_tokens
    assert 0 < pinned <= HOST_PAGES * PAGE * 2 / 3
    assert tier.evict() == 12 * 256 * PAGE - pinned
    tier.is_healthy = True
    tier.run()
    assert tier.evict() == pinned


def test_content_that_comes_back_overtakes_what_never_did() -> None:
    tier = Tier()
    tier.is_healthy = False
    nodes = {seed: tier.insert(chain(seed, 4)) for seed in (1, 2, 3)}
    longer = tier.insert(chain(2, 4) + chain(9, 1))  # a next turn
    tier.is_healthy = True
    tier.run()
    assert tier.num_queued == [nodes[2], nodes[1], nodes[3], longer]


def test_content_computed_again_after_a_loss_overtakes() -> None:
    tier = Tier()
    tier.is_healthy = False
    tier.insert(chain(1, 4))
    tier.spiller.release_pin()
    tier.evict()
    fresh = tier.insert(chain(2, 4))
    again = tier.insert(chain(1, 4))
    tier.is_healthy = True
    tier.step()
    assert tier.num_queued == [again, fresh]


def test_loads_go_first() -> None:
    tier = Tier()
    tier.ongoing_prefetch["request"] = object()
    node = tier.insert(chain(1, 4))
    tier.step()
    assert tier.num_queued == []
    tier.clock.now += MAX_HOLD_S
    tier.step()
    assert tier.num_queued == [node]


def test_sick_disk_is_given_nothing() -> None:
    tier = Tier()
    tier.is_healthy = False
    node = tier.insert(chain(1, 4))
    tier.run()
    assert tier.num_queued == []
    tier.is_healthy = True
    tier.run()
    assert tier.num_queued == [node]


def exhaust(tier: Tier) -> None:
    """Use the write budget up: 86 pages in a burst."""
    tier.insert(chain(100, 200))
    tier.run()
    assert tier.gate.outcomes[Outcome.DROPPED_BUDGET] > 0


def test_dropped_node_is_offered_to_an_idle_disk() -> None:
    tier = Tier(writes_per_day=100_000)
    exhaust(tier)
    tier.insert(chain(1, 4))
    tier.run()
    assert tier.stored_of(chain(1, 4)) == 0
    num_before = len(tier.num_queued)
    tier.clock.now += RETRY_S
    tier.run()
    assert len(tier.num_queued) == num_before  # it would be dropped again
    assert tier.ended == [(200 * PAGE, False), (4 * PAGE, False)]
    for _ in range(3):  # what is left of the long chain takes a budget of its own
        tier.clock.now += 4 * 3600
        tier.run()
    assert tier.stored_of(chain(1, 4)) == 4 and tier.stored_of(chain(100, 200)) == 200
    tier.evict()
    assert tier.accounting.left[EvictionOutcome.LOST_BUDGET] == 0
    assert dict(tier.ended) == {200 * PAGE: True, 4 * PAGE: True}


def test_unstorable_node_is_not_offered_for_ever() -> None:
    tier = Tier()
    node = tier.insert(chain(1, 4))
    tier.engine.close()  # refuses every store
    tier.run()
    assert tier.num_queued == [node]
    for _ in range(100):
        tier.clock.now += 1000
        tier.run(2)
    assert tier.num_queued == [node] * 4
    tier.evict()
    assert tier.accounting.left[EvictionOutcome.LOST_FAILED] == 4


def test_long_pause_of_one_node_delays_no_other() -> None:
    tier = Tier()
    tier.engine.close()  # refuses every store
    first = tier.insert(chain(1, 4))
    tier.run()
    tier.clock.now += RETRY_S
    tier.run()  # now it pauses for longer
    second = tier.insert(chain(11, 4))
    tier.run()
    tier.clock.now += RETRY_S
    tier.run()
    assert tier.num_queued == [first, first, second, second]


def test_node_with_a_gap_is_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may fail between the parts of a node, or hold its last page already."""
    tier = Tier()
    submit = tier.engine.submit_store

    def lose_first(run: Run) -> Any:
        monkeypatch.undo()
        return SimpleNamespace(ok=[False, *submit(Run(run.keys[1:], run.pages[1:])).ok])

    monkeypatch.setattr(tier.engine, "submit_store", lose_first)
    tier.insert(chain(1, 4))
    tier.run()
    assert tier.ended == [(4 * PAGE, False)]
    tier.clock.now += RETRY_S
    tier.run()
    assert tier.stored_of(chain(1, 4)) == 4 and tier.ended[1:] == [(4 * PAGE, True)]


def slow_lookups(tier: Tier, num_stored: int) -> list[int]:
    """Nodes that were stored in one go, and how long those are that are looked up from now on."""
    for seed in range(num_stored):
        tier.insert(chain(seed, 4))
        tier.step()
    assert len(tier.queued) == num_stored
    tier.work()
    found: list[int] = []

    def look_up(hashes: Sequence[str]) -> int:
        tier.clock.now += STORES_S_PER_STEP
        found.append(len(hashes))
        return len(hashes)

    tier.num_kept = look_up  # type: ignore[method-assign]
    return found


def test_long_nodes_that_ended_leave_steps_short() -> None:
    tier = Tier()
    found = slow_lookups(tier, 2)
    tier.step()
    assert found == [4]
    tier.step()
    assert found == [4, 4]


def test_stores_that_outpace_their_lookups_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_tiered.integration.cache.spiller.MAX_ENDED", 2)
    tier = Tier()
    slow_lookups(tier, 4)
    tier.step()
    assert len(tier.spiller._ended) == 1


def test_missing_ancestor_is_stored_before_its_descendant() -> None:
    tier = Tier()
    ancestor = tier.insert(chain(1, 4), offer=False)
    middle = tier.insert(chain(1, 4) + chain(2, 2), offer=False)
    node = tier.insert(chain(1, 4) + chain(2, 2) + chain(3, 1))
    tier.run()
    assert tier.num_queued == [ancestor, middle, node]
    sibling = tier.insert(chain(1, 4) + chain(4, 1))
    tier.run()
    assert tier.num_queued == [ancestor, middle, node, sibling]


@pytest.mark.parametrize("is_long", [False, True])
def test_selective_admission_gets_ancestors_of_long_chains(is_long: bool) -> None:
    tier = Tier(writes_per_day=100_000)
    exhaust(tier)
    tier.gate._admission.level = Level.SELECTIVE
    tier.gate._admission._pressure = 0.5
    num_pages = LONG_PREFIX_TOKENS // PAGE - (not is_long)
    ancestor = tier.insert(chain(1, 4), offer=False)
    node = tier.insert(chain(1, 4) + chain(2, num_pages - 4))
    num_before = len(tier.num_queued)
    tier.run()
    assert tier.num_queued[num_before:] == ([ancestor, node] if is_long else [node])


def test_flushed_tree_leaves_nothing_waiting() -> None:
    tier = Tier()
    tier.is_healthy = False
    tier.insert(chain(1, 4))
    tier.copies.remember(77)
    tier.tree_core.reset()
    tier.spiller.clear()
    tier.copies.clear()
    tier.accounting.note_flushed()
    tier.is_healthy = True
    tier.run()
    assert tier.num_queued == [] and tier.accounting.left[EvictionOutcome.LOST_FLUSHED] == 4


def detach(tier: Tier) -> None:
    tiering: Any = Tiering.__new__(Tiering)
    tiering.loads, tiering.stores = SimpleNamespace(detached=lambda: None), tier.spiller
    tiering.returns = SimpleNamespace(drop_all=lambda: None)
    tiering.hints = SimpleNamespace(end_all=lambda why: None)
    tiering.detached()


def test_detached_tier_unpins_everything() -> None:
    tier = Tier()
    tier.insert(chain(1, 4))
    detach(tier)
    assert tier.evict() == 4 * PAGE


def test_detached_tier_leaves_no_device_lock() -> None:
    """SGLang forgets the stores under way without handing on their ends."""
    tier: Any = Tier()
    core, locks = tier.tree_core, {1: 0}
    tier.has_small_host = True
    tier.tree_core = SimpleNamespace(
        is_full_device_evicted=lambda node: False, has_copied_path=lambda node: False
    )
    tier.inc_lock_ref = lambda node: SimpleNamespace(to_dec_params=lambda: locks.update({node: 1}))
    tier.dec_lock_ref = lambda node, params: locks.update({node: 0})
    tier.begin_store = lambda node, _: tier.ongoing_backup.update({7: node}) or 7
    assert tier.spiller._queue_store(1, PAGE) == 7 and locks == {1: 1}
    tier.ongoing_backup.clear()
    tier.tree_core = core
    detach(tier)
    assert locks == {1: 0}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("insert"), st.integers(0, 5), st.integers(1, 12), st.integers(0, 12)),
            st.tuples(st.sampled_from(["step", "work", "evict", "load", "sick", "unpin"])),
            st.tuples(st.just("flush")),
        ),
        max_size=60,
    )
)
def test_no_order_of_events_leaves_a_pin(
    events: list[tuple[Any, ...]],
) -> None:
    tier = Tier()
    for event, *numbers in events:
        if event == "insert":
            seed, num_pages, shared = numbers
            tier.insert(chain(seed, num_pages, min(shared, num_pages)))
        elif event == "step":
            tier.step()
        elif event == "work":
            tier.work(1)
        elif event == "evict":
            tier.evict(3 * PAGE)
        elif event == "load":
            tier.ongoing_prefetch = {} if tier.ongoing_prefetch else {"request": object()}
        elif event == "sick":
            tier.is_healthy = not tier.is_healthy
        elif event == "unpin":
            tier.spiller.release_pin()
        elif not tier.ongoing_backup:  # as SGLang, which refuses to flush while stores are queued
            tier.tree_core.reset()
            tier.spiller.clear()
            tier.accounting.note_flushed()
            tier.free_pages = list(range(HOST_PAGES))
        tier.spiller.queue.check_integrity()
        tier.clock.now += 0.1
    tier.ongoing_prefetch, tier.is_healthy = {}, True
    tier.run(200)
    assert len(tier.spiller.queue) == 0 and len(tier.spiller._locks) == 0
    tier.evict()
    assert len(tier.free_pages) == HOST_PAGES
    tier.accounting.check_integrity()
    assert tier.accounting.num_dirty == 0
