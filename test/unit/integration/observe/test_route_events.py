"""Events of SGLang's own publisher are followed from before the picker was there."""

from __future__ import annotations

import asyncio
import atexit
import json
import time
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    StorageMedium,
    ZmqEventPublisher,
    kv_event_namespace_seed,
    namespaced_block_hash,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import (
    compute_node_event_hash_values,
    get_storage_hash_str,
    hash_str_to_int64,
)

from server_process import free_ports
from sglang_tiered.integration.admin.costs import event_source
from sglang_tiered.integration.observe.kv_events import _Node
from sglang_tiered.policy.server_costs import EventSource
from sglang_tiered.route.events import apply, follow, publisher_of
from sglang_tiered.route.pages import HeldPages
from sglang_tiered.route.prompt import Prompt, page_keys
from sglang_tiered.sharing.mirror import fingerprints_of

DEADLINE_S = 20.0


def stored(*keys: int, medium: str = StorageMedium.GPU) -> BlockStored:
    return BlockStored(list(keys), None, [0] * len(keys), 1, None, medium=medium)


class Told:
    """A publisher of SGLang, and what a picker has learnt of it."""

    def __init__(self) -> None:
        port = free_ports(2)
        self._publisher = ZmqEventPublisher(
            0, f"tcp://*:{port}", f"tcp://*:{port + 1}", buffer_steps=100, topic="kv"
        )
        self._where = publisher_of(EventSource("*", port, "kv", port + 1), "http://127.0.0.1:1", 0)
        self.index = HeldPages()

    def publish(self, *events: object) -> None:
        self._publisher.publish(KVEventBatch(ts=time.time(), events=list(events)))

    def follow_until(self, steps: list[tuple[Callable[[], None], Callable[[], bool]]]) -> None:
        """Follow; take each step, and wait for what it brings."""

        async def run() -> None:
            context = zmq.asyncio.Context()
            work = asyncio.create_task(follow(context, self._where, self.index, 0))
            try:
                for act, is_seen in steps:
                    act()
                    deadline = time.monotonic() + DEADLINE_S
                    while not is_seen():
                        assert not work.done(), work.exception()
                        assert time.monotonic() < deadline
                        await asyncio.sleep(0.01)
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                context.destroy(linger=0)

        asyncio.run(run())

    def own(self, *keys: int) -> tuple[int, int, int]:
        return self.index.own(0, keys)

    def close(self) -> None:
        atexit.unregister(self._publisher.shutdown)
        self._publisher.shutdown()


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    yield made
    made.close()


def test_what_was_before_is_replayed(told: Told) -> None:
    told.publish(stored(1, 2), stored(1, 2, 3, medium=StorageMedium.DISK))
    told.publish(BlockRemoved([2], medium=StorageMedium.GPU))
    told.follow_until(
        [
            (lambda: None, lambda: told.own(1, 2, 3) == (1, 1, 3)),
            (lambda: told.publish(stored(2)), lambda: told.own(1, 2, 3) == (2, 2, 3)),
            (lambda: told.publish(AllBlocksCleared()), lambda: told.own(1) == (0, 0, 0)),
        ]
    )


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([0.0, [{"type": "X"}]])])
def test_batch_of_another_kind_is_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        apply(HeldPages(), 0, payload)


@pytest.mark.parametrize(
    ("told", "source"),
    [
        ({"publisher": "null"}, None),
        ({"endpoint": "ipc:///tmp/x"}, None),
        (
            {"endpoint": "tcp://[::1]:1", "replay_endpoint": "tcp://*:2", "format": "dynamo"},
            EventSource("[::1]", 1, "", 2, by_tenant=True),
        ),
    ],
)
def test_costs_say_where_events_are(told: dict[str, str], source: EventSource | None) -> None:
    text = json.dumps({"publisher": "zmq", "topic": "", **told})
    sizes = {"page_size": 64, "dp_size": 2, "attn_dp_size": 1, "dcp_size": 1}
    settings = SimpleNamespace(kv_events_config=text, load_publish_endpoint=None, **sizes)
    assert event_source(settings) == source
    found = publisher_of(EventSource("*", 5557, "kv", 7000), "http://[::1]:80", 2)
    assert found == ("tcp://[::1]:5559", "tcp://[::1]:7002", "kv"), "of the third replica"


PAGE = 16
IDS = [(7 * number * number + 3) % 50_000 for number in range(5 * PAGE + 3)]


@pytest.mark.parametrize("extra_key", [None, "", "tenant-a", "ü"])
@pytest.mark.parametrize("cache_salt", [None, "", "salt"])
def test_keys_are_the_hashes_of_sglangs_events(
    extra_key: str | None, cache_salt: str | None
) -> None:
    key = RadixKey(IDS[: 5 * PAGE], extra_key=extra_key, cache_salt=cache_salt)
    root = _Node(RadixKey([]), None, [])
    node: Any = _Node(key, root, None)  # type: ignore[arg-type]
    if extra_key is None and cache_salt is None:
        node.hash_value = None
    hashes = compute_node_event_hash_values(node, PAGE)
    seed = kv_event_namespace_seed(extra_key=key.extra_key, cache_salt=key.cache_salt)
    told = [namespaced_block_hash(hash_str_to_int64(one), namespace_seed=seed) for one in hashes]
    assert page_keys(array("I", IDS), PAGE, extra_key, cache_salt) == told
    assert len(told) == 5
    names = get_storage_hash_str(key, page_size=PAGE)
    prompt = Prompt(len(IDS), array("I", IDS), extra_key, cache_salt)
    assert prompt.stored(PAGE).tolist() == fingerprints_of(list(map(bytes.fromhex, names))).tolist()
