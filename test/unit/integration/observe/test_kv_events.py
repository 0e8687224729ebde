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
        self.nodes: list[Any] = [self._node(None, [], hash_value=[])]
        self.num_read = 0

    def _node(self, parent: Any, tokens: Sequence[int], *, hash_value: Any, **of: Any) -> Any:
        key = RadixKey(list(tokens), **of)
        named = {"hash_value": hash_value, "event_hash_value": None}
        return SimpleNamespace(parent=parent, key=key, **named)

    def add(self, parent: int, tokens: Sequence[int], **namespace: Any) -> int:
        node = self._node(self.nodes[parent], tokens, hash_value=None, **namespace)
        prior = node.parent.hash_value[-1] if node.parent.hash_value else None
        node.hash_value = get_storage_hash_str(node.key, prior, page_size=PAGE)
        node.node_id = len(self.nodes)
        self.nodes.append(node)
        return node.node_id

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


class Tier(set[bytes]):
    """Holds the keys that a test puts into it."""

    def __call__(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self for key in keys]


class Made(SimpleNamespace):
    core: Core
    disk: Tier
    events: TierEvents

    def announce(self, tokens: Sequence[int]) -> int:
        """A node, all of which the disk holds, is announced."""
        node = self.core.add(0, tokens)
        self.disk.update(self.core.keys(node))
        self.events.announce_node(node)
        return node


@pytest.fixture
def made() -> Made:
    core, disk = Core(), Tier()
    events = TierEvents(core, {DISK: disk}, core.params, max_pages=8)
    return Made(core=core, disk=disk, events=events)


def stored(events: list[Any], medium: StorageMedium = DISK) -> list[int]:
    mine = [e for e in events if isinstance(e, BlockStored) and e.medium == medium]
    return [block for event in mine for block in event.block_hashes]


def removed(events: list[Any], medium: StorageMedium = DISK) -> list[int]:
    mine = [e for e in events if isinstance(e, BlockRemoved) and e.medium == medium]
    return [block for event in mine for block in event.block_hashes]


@pytest.mark.parametrize("dynamo_format", [False, True])
@pytest.mark.parametrize(
    "namespace", [{}, {"extra_key": "tenant"}, {"cache_salt": "salt"}], ids=["none", "key", "salt"]
)
def test_blocks_differ_from_those_of_device_memory(
    dynamo_format: bool, namespace: dict[str, str]
) -> None:
    core, disk = Core(dynamo_format=dynamo_format), Tier()
    events = TierEvents(core, {DISK: disk}, core.params)
    last, nodes = 0, []
    for first, end in ((0, 8), (8, 20), (20, 28)):
        last = core.add(last, range(first, end), **namespace)
        disk.update(core.keys(last))
        nodes.append(core.nodes[last])
    events.announce_node(last)
    mine = events.take_events()
    for node in nodes:
        core.recorder.record_store(node)
    theirs = core.recorder.take()
    assert len(mine) == len(theirs) == 1
    assert mine[0].medium == "DISK" and theirs[0].medium == "GPU"
    theirs[0].medium = mine[0].medium
    assert mine == theirs


def test_memory_grows_with_the_tier(made: Made) -> None:
    first = made.announce(range(24))
    blocks = stored(made.events.take_events())
    made.announce(range(100, 120))
    made.events.sweep()  # finds them all, also what is to be forgotten
    events = made.events.take_events()
    assert removed(events) == blocks[:3] and len(stored(events)) == 5
    made.events.announce_node(first)
    assert stored(made.events.take_events()) == []  # its last page is remembered


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
            made.disk.update(made.core.keys(node))
            events.announce_node(node)
            if turn % 3 == 0:
                made.disk.difference_update(made.core.keys(nodes[turn // 2]))
            apply(events.take_events())
    finally:
        done.set()
        thread.join(timeout=60)
    assert not thread.is_alive()
    events.sweep()
    while batch := events.take_events():
        apply(batch)
    assert known == {int.from_bytes(key[:8], "big", signed=True) for key in made.disk}


def test_thread_outlives_the_cache(made: Made) -> None:
    made.events.start()
    thread = made.events._thread
    assert thread is not None and thread.is_alive()
    made.events.close()
    assert not thread.is_alive()
    made.events.close()


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
