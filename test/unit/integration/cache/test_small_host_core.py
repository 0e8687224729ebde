"""Whatever comes in what order, the tree stays sound, and what counts as evictable is."""

from __future__ import annotations

import atexit
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import compute_node_hash_values, get_storage_hash_str
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from small_cache import make_pool

from sglang_tiered.integration.cache import small_host as small_host_core
from sglang_tiered.integration.cache.small_host import SmallHostTreeCore
from sglang_tiered.integration.platforms.cpu import patch_host_pools

PAGE, DEVICE_PAGES, HOST_PAGES = 4, 24, 8


def make_cache() -> UnifiedRadixCache:
    patch_host_pools()
    small_host_core.register_core()
    arguments = ServerArgs(
        model_path="dummy",
        device="cpu",
        page_size=PAGE,
        hicache_io_backend="direct",
        hicache_mem_layout="page_first_direct",
        hicache_ratio=HOST_PAGES / DEVICE_PAGES,
    )
    set_global_server_args_for_scheduler(arguments)
    params = CacheInitParams(
        req_to_token_pool=ReqToTokenPool(4, PAGE * DEVICE_PAGES, "cpu", enable_memory_saver=False),
        token_to_kv_pool_allocator=make_pool(DEVICE_PAGES, PAGE, layers=1, heads=1, dim=4),
        page_size=PAGE,
        disable=False,
        tree_components=(ComponentType.FULL,),
        tree_core_backend=small_host_core.BACKEND_NAME,
    )
    cache = UnifiedRadixCache(params)
    cache.init_hicache(arguments, params)
    atexit.unregister(cache.shutdown)
    cache.load_back_threshold = 0
    return cache


def tokens_of(letters: str) -> list[int]:
    """A page per letter; the same letter at the same place is the same page."""
    return [ord(letter) for letter in letters for _ in range(PAGE)]


class SmallHost(RuleBasedStateMachine):
    """Requests, loads, stores and evictions, on 24 device pages above a host tier of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache()
        self.core: SmallHostTreeCore = self.cache.tree_core
        self.allocator = self.cache.token_to_kv_pool_allocator
        self.host = self.cache.cache_controller.mem_pool_host
        self.core.max_copy_tokens = 2 * PAGE
        self.stores: list[tuple[int, Any, Any]] = []

    def key(self, letters: str) -> RadixKey:
        return RadixKey(array("q", tokens_of(letters)))

    def nodes(self) -> list[Any]:
        return [node for node in self.core._node_arena.values() if node is not self.core.root_node]

    @rule(letters=st.text("abc", min_size=1, max_size=6))
    def insert(self, letters: str) -> None:
        needed = len(letters) * PAGE
        if self.allocator.available_size() < needed:
            self.cache.evict(EvictParams(num_tokens=needed - self.allocator.available_size()))
        slots = self.allocator.alloc(needed)
        if slots is None:
            assert self.stores  # which lock what they read
            return
        result = self.cache.insert(InsertParams(key=self.key(letters), value=slots))
        assert result.total_len in (0, needed)

    @rule(data=st.data())
    def a_skipped_copy_is_made(self, data: st.DataObject) -> None:
        lacking = [node.id for node in self.nodes() if not node.backuped]
        if lacking:
            for part in self.core.parts_to_copy(data.draw(st.sampled_from(sorted(lacking)))):
                self.cache._execute_and_commit_kv_backup(BackupKV([part]))

    @rule()
    def copies_are_done(self) -> None:
        self.cache.cache_controller.start_writing()
        self.cache.writing_check()

    @rule(letters=st.text("abc", min_size=1, max_size=6))
    def load_back(self, letters: str) -> None:
        match = self.cache.match_prefix(MatchPrefixParams(key=self.key(letters)))
        if match.host_hit_length and self.cache.load_back(match.best_match_node):
            self.cache.ready_to_load_host_cache()
            self.cache.loading_check()

    @rule(letters=st.text("abc", min_size=1, max_size=6))
    def a_load_lands(self, letters: str) -> None:
        key = self.key(letters)
        match = self.cache.match_prefix(MatchPrefixParams(key=key))
        start = match.device_prefix_len + match.host_hit_length
        if start == len(key):
            return
        anchor = match.last_host_node
        lock = self.cache.inc_host_lock_ref(anchor).to_dec_params()
        slots = self.host.alloc(len(key) - start)
        if slots is None:
            self.cache.evict_host(len(key) - start)
            slots = self.host.alloc(len(key) - start)
        if slots is not None:
            hashes = get_storage_hash_str(key, None, page_size=PAGE)[start // PAGE :]
            result = self.core.insert_host(anchor, key[start:], slots, hashes)
            self.cache._apply_cache_actions(result.cache_actions)
            num_unused = len(slots) if result.host_insert_dropped else result.prefix_len
            self.host.free(slots[:num_unused])
        self.cache.dec_host_lock_ref(anchor, lock)

    @rule(data=st.data())
    def a_store_begins(self, data: st.DataObject) -> None:
        copied = [node.id for node in self.nodes() if node.backuped]
        if not copied or len(self.stores) > 2:
            return
        node_id = data.draw(st.sampled_from(sorted(copied)))
        lock = self.cache.inc_host_lock_ref(node_id).to_dec_params()
        device_lock = None
        if not self.core.is_full_device_evicted(node_id):
            device_lock = self.cache.inc_lock_ref(node_id).to_dec_params()
        self.stores.append((node_id, lock, device_lock))

    @precondition(lambda self: self.stores)
    @rule()
    def a_store_ends(self) -> None:
        node_id, lock, device_lock = self.stores.pop(0)
        self.cache.dec_host_lock_ref(node_id, lock)
        if device_lock is not None:
            self.cache.dec_lock_ref(node_id, device_lock)

    @rule(num_pages=st.integers(1, DEVICE_PAGES))
    def device_memory_is_short(self, num_pages: int) -> None:
        evictable = self.core.evictable_size()
        evicted = self.cache.evict(EvictParams(num_tokens=num_pages * PAGE)).num_tokens_evicted
        assert evicted >= min(num_pages * PAGE, evictable)

    @rule(num_pages=st.integers(1, HOST_PAGES))
    def host_memory_is_short(self, num_pages: int) -> None:
        self.cache.evict_host(num_pages * PAGE)

    @invariant()
    def what_is_in_host_memory_only_hangs_on_copies(self) -> None:
        for node in self.nodes():
            if node.evicted:
                assert node.backuped and self.core.has_copied_path(node.id), node.id

    @invariant()
    def the_tree_is_sound(self) -> None:
        self.core.sanity_check(
            [(each, node.node_id) for each, node in self.cache.ongoing_write_through.items()],
            [],
        )

    def teardown(self) -> None:
        while self.stores:
            self.a_store_ends()
        self.copies_are_done()
        self.cache.evict(EvictParams(num_tokens=DEVICE_PAGES * PAGE))
        assert self.allocator.available_size() == DEVICE_PAGES * PAGE
        self.cache.evict_host(self.host.logical_size)
        assert self.host.available_size() == self.host.logical_size
        self.cache.release_host_resources()


TestSmallHost = pytest.mark.timeout(120)(SmallHost.TestCase)
TestSmallHost.settings = settings(max_examples=25, stateful_step_count=30)


@pytest.fixture
def small() -> Iterator[SmallHost]:
    small = SmallHost()
    small.core.is_stored = lambda _: True
    yield small
    small.teardown()


def insert_and_copy(small: SmallHost, letters: str) -> Any:
    """The node that holds the last page."""
    small.insert(letters)
    small.copies_are_done()
    match = small.cache.match_prefix(MatchPrefixParams(key=small.key(letters)))
    node = small.core.node_by_id(match.best_match_node)
    node.hash_value = compute_node_hash_values(node, PAGE)  # as with storage attached
    return node


def test_a_copy_stays_until_it_is_stored(small: SmallHost) -> None:
    old, new = insert_and_copy(small, "aaaa"), insert_and_copy(small, "bbb")
    small.core.may_give_up = lambda node_id: node_id != new.id
    assert insert_and_copy(small, "ccc").backuped
    assert new.backuped and not old.backuped


def test_only_what_nvme_lost_is_copied_again(small: SmallHost) -> None:
    held: set[str] = set()
    small.core.is_stored = held.issuperset
    node = insert_and_copy(small, "a")
    held.update(node.hash_value)
    small.host_memory_is_short(HOST_PAGES)
    assert not insert_and_copy(small, "a").backuped
    held.clear()
    assert insert_and_copy(small, "a").backuped


def test_no_host_only_node_lacks_its_ancestors_copy(small: SmallHost) -> None:
    prefix = insert_and_copy(small, "a")
    small.host_memory_is_short(HOST_PAGES)
    suffix = insert_and_copy(small, "ab")
    assert suffix.backuped and not prefix.backuped
    small.cache.evict(EvictParams(num_tokens=PAGE))
    assert small.nodes() == [prefix] and small.host.available_size() == small.host.logical_size


def test_a_released_host_lock_does_not_stop_eviction(small: SmallHost) -> None:
    insert_and_copy(small, "a")
    small.host_memory_is_short(HOST_PAGES)
    insert_and_copy(small, "ab")
    leaf = insert_and_copy(small, "abc")
    lock = small.cache.inc_host_lock_ref(leaf.id).to_dec_params()
    small.cache.evict(EvictParams(num_tokens=2 * PAGE))
    small.cache.dec_host_lock_ref(leaf.id, lock)
    small.cache.evict(EvictParams(num_tokens=2 * PAGE))
    assert small.allocator.available_size() == DEVICE_PAGES * PAGE
