"""What a router is told of lower tiers that is not so, or that it cannot match with the rest."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from shared_tier import SharedTier

from kit.memory import MemoryEngine
from sglang_tiered.errors import UnsupportedSGLangError
from sglang_tiered.integration.observe import kv_events
from sglang_tiered.integration.observe.kv_events import TierEvents, tiers_of
from sglang_tiered.storage.base import Run

PAGE = 4
DISK, EXTERNAL = StorageMedium.DISK, StorageMedium.EXTERNAL


class Core:
    """A tree as its interface tells of it, and as SGLang's own recorder reads it."""

    is_eagle = False

    def __init__(self, *, dynamo_format: bool = False) -> None:
        self.params: Any = SimpleNamespace(
            enable_kv_cache_events=True,
            page_size=PAGE,
            dynamo_kv_event_format=dynamo_format,
            kv_event_lora_names=None,
        )
        self.recorder = KVCacheEventRecorder(
            enabled=True, page_size=PAGE, dynamo_format=dynamo_format
        )
        root = SimpleNamespace(parent=None, key=RadixKey([]), hash_value=[], event_hash_value=None)
        self.nodes: list[Any] = [root]
        self.num_read = 0

    def add(self, parent: int, tokens: Sequence[int], **namespace: Any) -> int:
        node = SimpleNamespace(
            node_id=len(self.nodes),
            parent=self.nodes[parent],
            key=RadixKey(list(tokens), **namespace),
            hash_value=None,
            event_hash_value=None,
        )
        prior = node.parent.hash_value[-1] if node.parent.hash_value else None
        node.hash_value = get_storage_hash_str(node.key, prior, page_size=PAGE)
        self.nodes.append(node)
        return len(self.nodes) - 1

    def get_hash_values(self, node_id: int) -> list[str]:
        return self.nodes[node_id].hash_value or []

    def prefetch_anchor_info(self, node_id: int) -> tuple[str | None, str | None]:
        key = self.nodes[node_id].key
        return key.extra_key, key.cache_salt

    def build_storage_backup_spec(self, node_id: int, pass_prefix_keys: bool) -> Any:
        self.num_read += 1
        return SimpleNamespace(token_ids=self.nodes[node_id].key.token_ids)

    def collect_path_info(self, node_ids: Sequence[int]) -> list[list[Any]]:
        if node_ids[0] >= len(self.nodes):
            raise KeyError(node_ids[0])
        path, node = [], self.nodes[node_ids[0]]
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return [path[::-1]]

    def keys(self, node_id: int) -> list[bytes]:
        return [bytes.fromhex(text) for text in self.get_hash_values(node_id)]


class Tier:
    """Holds what a test says."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.is_sick = False

    def __call__(self, keys: Sequence[bytes]) -> list[bool] | None:
        return None if self.is_sick else [key in self.keys for key in keys]


class Made(SimpleNamespace):
    core: Core
    disk: Tier
    bucket: Tier
    events: TierEvents

    def announce(self, tokens: Sequence[int]) -> int:
        """A node, all of which the disk holds, is announced."""
        node = self.core.add(0, tokens)
        self.disk.keys.update(self.core.keys(node))
        self.events.announce_node(node)
        return node


@pytest.fixture
def made() -> Made:
    core, disk, bucket = Core(), Tier(), Tier()
    events = TierEvents(core, {DISK: disk, EXTERNAL: bucket}, core.params, max_pages=8)
    return Made(core=core, disk=disk, bucket=bucket, events=events)


def stored(events: list[Any], medium: StorageMedium = DISK) -> list[int]:
    assert all(isinstance(event, BlockStored | BlockRemoved) for event in events)
    mine = [e for e in events if isinstance(e, BlockStored) and e.medium == medium]
    return [block for event in mine for block in event.block_hashes]


def removed(events: list[Any], medium: StorageMedium = DISK) -> list[int]:
    mine = [e for e in events if isinstance(e, BlockRemoved) and e.medium == medium]
    return [block for event in mine for block in event.block_hashes]


@pytest.mark.parametrize("dynamo_format", [False, True])
@pytest.mark.parametrize(
    "namespace", [{}, {"extra_key": "tenant"}, {"cache_salt": "salt"}], ids=["none", "key", "salt"]
)
@pytest.mark.parametrize("in_steps", [False, True])
def test_blocks_differ_from_those_of_device_memory(
    dynamo_format: bool, namespace: dict[str, str], in_steps: bool
) -> None:
    core, disk = Core(dynamo_format=dynamo_format), Tier()
    events = TierEvents(core, {DISK: disk}, core.params)
    first = core.add(0, range(8), **namespace)
    second = core.add(first, range(8, 20), **namespace)
    disk.keys.update(core.keys(first) + core.keys(second))
    third = core.add(second, range(20, 28), **namespace)
    disk.keys.update(core.keys(third))
    if in_steps:
        events.announce_node(first)
        events.announce_node(second)
    events.announce_node(third)
    mine = events.take_events()
    assert core.num_read == 3
    for node_id in (first, second, third):
        core.recorder.record_store(core.nodes[node_id])
    theirs = core.recorder.take()
    assert len(mine) == len(theirs) == 1
    assert mine[0].medium == "DISK" and theirs[0].medium == "GPU"
    theirs[0].medium = mine[0].medium
    assert mine == theirs


def test_page_is_announced_before_it_can_be_read(made: Made) -> None:
    node = made.core.add(0, range(12))
    made.events.announce_node(node)
    assert made.events.take_events() == []
    made.disk.keys.update(made.core.keys(node)[:2])  # admission dropped the rest
    made.events.announce_node(node)
    assert len(stored(made.events.take_events())) == 2
    made.disk.keys.update(made.core.keys(node))
    made.events.announce_node(node)
    events = made.events.take_events()
    assert len(stored(events)) == 1
    assert events[0].token_ids == [8, 9, 10, 11]
    assert events[0].parent_block_hash is not None


def test_page_is_announced_again_and_again(made: Made) -> None:
    node = made.announce(range(8))
    for _ in range(2):
        made.events.announce_node(node)
    assert len(stored(made.events.take_events())) == 2
    made.events.announce_node(node)
    made.events.sweep()
    assert made.events.take_events() == []


def test_page_that_went_is_still_announced(made: Made) -> None:
    keys = made.core.keys(made.announce(range(16)))
    blocks = stored(made.events.take_events())
    made.disk.keys -= {keys[0], keys[2]}
    made.events.sweep()
    assert removed(made.events.take_events()) == [blocks[0], blocks[2]]
    made.events.sweep()
    assert made.events.take_events() == []


def test_demotion_to_the_bucket_goes_unnoticed(made: Made) -> None:
    keys = made.core.keys(made.announce(range(8)))
    (first,) = made.events.take_events()
    made.bucket.keys.update(keys)
    made.events.sweep()
    (event,) = made.events.take_events()
    assert event.medium == "EXTERNAL"
    assert (event.block_hashes, event.token_ids) == (first.block_hashes, first.token_ids)
    made.disk.keys.clear()
    made.events.sweep()
    events = made.events.take_events()
    assert removed(events) == first.block_hashes and removed(events, EXTERNAL) == []


def test_flush_announces_again_what_the_disk_kept(made: Made) -> None:
    """SGLang's event for a flush clears all media."""
    made.announce(range(8))
    before = made.events.take_events()
    assert len(stored(before)) == 2
    made.events.tree_was_reset()
    assert made.events.take_events() == before


def test_memory_grows_with_the_tier(made: Made) -> None:
    first = made.announce(range(24))
    blocks = stored(made.events.take_events())
    made.announce(range(100, 120))
    made.events.sweep()  # finds them all, also what is to be forgotten
    events = made.events.take_events()
    assert removed(events) == blocks[:3] and len(stored(events)) == 5
    made.events.sweep()
    assert made.events.take_events() == []  # what is forgotten stays so until it is used
    made.events.announce_node(first)
    assert stored(made.events.take_events()) == []  # its last page is remembered


def test_a_take_is_as_long_as_the_backlog(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_PAGES_PER_TAKE", 3)
    made.announce(range(32))
    assert [len(stored(made.events.take_events())) for _ in range(4)] == [3, 3, 2, 0]


def test_node_that_was_evicted_ends_the_scheduler(made: Made) -> None:
    made.events.announce_node(77)
    assert made.events.take_events() == []


def test_sweep_and_scheduler_lose_a_change(made: Made) -> None:
    """Both at once, as in a server; in the end all that is held is announced, once."""
    events = TierEvents(made.core, {DISK: made.disk}, made.core.params)
    nodes = [made.core.add(0, range(start, start + 8)) for start in range(0, 800, 8)]
    done, known = threading.Event(), set()

    def sweep() -> None:
        while not done.wait(0.001):
            events.sweep()

    def apply(batch: list[Any]) -> None:
        for event in batch:
            blocks = set(event.block_hashes)
            if isinstance(event, BlockStored):
                assert not blocks & known
                known.update(blocks)
            else:
                assert blocks <= known
                known.difference_update(blocks)

    thread = threading.Thread(target=sweep)
    thread.start()
    try:
        for turn, node in enumerate(nodes):
            made.disk.keys.update(made.core.keys(node))
            events.announce_node(node)
            if turn % 3 == 0:
                made.disk.keys.difference_update(made.core.keys(nodes[turn // 2]))
            apply(events.take_events())
    finally:
        done.set()
        thread.join(timeout=60)
    assert not thread.is_alive()
    events.sweep()
    while batch := events.take_events():
        apply(batch)
    names = {int.from_bytes(key[:8], "big", signed=True) for key in made.disk.keys}
    assert known == names


def test_thread_outlives_the_cache(made: Made) -> None:
    made.events.start()
    thread = made.events._thread
    assert thread is not None and thread.is_alive()
    made.events.close()
    assert not thread.is_alive()
    made.events.close()


def test_events_nobody_asked_for(made: Made) -> None:
    made.core.params.enable_kv_cache_events = False
    nothing: Any = None
    assert TierEvents.of_cache(made.core, nothing, made.core.params) is None


def test_changed_upstream_is_found_by_a_wrong_event(monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"{kv_events._EVENTS}.record_store"
    monkeypatch.setitem(kv_events._SIGNATURES, target, ("self", "no_such_parameter"))
    core = Core()
    with pytest.raises(UnsupportedSGLangError, match="record_store"):
        TierEvents(core, {}, core.params)


def test_a_sick_bucket_has_not_lost_its_pages() -> None:
    """Its pages are told to be gone, and told of again when it is well."""
    core, bucket = Core(), SharedTier()
    stack = SimpleNamespace(nvme=MemoryEngine(1 << 20), bucket=bucket)
    storage: Any = SimpleNamespace(stack=stack)
    events = TierEvents(core, tiers_of(storage), core.params)
    node = core.add(0, range(8))
    keys = core.keys(node)
    assert bucket.submit_store(Run(tuple(keys), ((memoryview(b"x"),),) * 2)).wait(20.0)
    events.announce_node(node)
    blocks = stored(events.take_events(), EXTERNAL)
    assert len(blocks) == 2
    bucket.sick = True
    events.sweep()
    assert removed(events.take_events(), EXTERNAL) == blocks
    bucket.sick = False
    events.sweep()
    assert stored(events.take_events(), EXTERNAL) == blocks
