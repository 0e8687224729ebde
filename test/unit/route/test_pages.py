"""What replicas hold of a prompt, memory by memory, in prefix order."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from kit.cost_records import record_of
from sglang_tiered.policy.cost_model import CostModel, PrefillCost
from sglang_tiered.policy.routing import Held, ServerState
from sglang_tiered.policy.server_costs import EventSource
from sglang_tiered.route import replicas
from sglang_tiered.route.replicas import DEVICE, DISK, EXTERNAL, HOST, HeldPages, Replica, Shared

KEYS = [11, 22, 33, 44, 55, 66]


def pages_of(*stored: tuple[int, list[int]]) -> HeldPages:
    made = HeldPages()
    for media, keys in stored:
        made.store(media, keys)
    return made


def test_each_memory_counts_what_lies_beyond() -> None:
    pages = pages_of((DEVICE, KEYS[:1]), (HOST, KEYS[:3]), (DISK, KEYS[:4]))
    assert pages.held(KEYS, 10) == Held(device=10, host=20, nvme=10)
    gap = pages_of((DEVICE, [KEYS[0], KEYS[2]]), (DISK, KEYS[3:]))
    assert gap.held(KEYS, 1) == Held(device=1), "it ends the prefix"


def test_peers_then_bucket_lie_beyond_the_own() -> None:
    one = pages_of((DEVICE, KEYS[:1]))
    all_of_them = [one, pages_of((DISK, KEYS[:3])), pages_of((EXTERNAL, KEYS[:5])), HeldPages()]
    shared = Shared(KEYS, all_of_them)
    assert (shared.end(0, DISK), shared.end(3, EXTERNAL), shared.end(5, EXTERNAL)) == (3, 5, 5)
    both = one.held(KEYS, 1, shared, has_peers=True, has_bucket=True)
    assert both == Held(device=1, peer=2, object=2)
    assert one.held(KEYS, 1, shared, has_peers=True) == Held(device=1, peer=2)
    assert one.held(KEYS, 1, shared, has_bucket=True) == Held(device=1, object=4)
    nothing = all_of_them[-1].held(KEYS, 1, shared, has_peers=True, has_bucket=True)
    assert nothing == Held(peer=3, object=2)


def test_removed_from_one_memory_stays_in_another() -> None:
    pages = pages_of((DEVICE, KEYS), (DISK, KEYS))
    pages.remove(DEVICE, KEYS)
    assert pages.held(KEYS, 1) == Held(nvme=6)
    pages.remove(DISK, KEYS)
    assert len(pages) == 0


def test_forgotten_memory_leaves_disks() -> None:
    pages = pages_of((DEVICE | HOST, KEYS), (DISK, KEYS[:2]))
    pages.forget(DEVICE | HOST)
    assert pages.held(KEYS, 1) == Held(nvme=2)
    pages.forget()
    assert pages.held(KEYS, 1) == Held()


def test_expected_pages_count_until_the_last_settles() -> None:
    pages = HeldPages()
    pages.expect(KEYS)
    pages.expect(KEYS[:2])
    assert pages.held(KEYS, 1) == Held(device=6)
    pages.settle(KEYS)
    assert pages.held(KEYS, 1) == Held(device=2)
    pages.settle(KEYS[:2])
    assert pages.held(KEYS, 1) == Held() and not pages._soon


# ---- Events ----


def batch(*events: tuple[str, str | None, list[int]]) -> bytes:
    made = [{"type": kind, "medium": medium, "block_hashes": keys} for kind, medium, keys in events]
    return msgspec.msgpack.encode([0.0, made])


def test_events_tell_memories_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = HeldPages()
    pages.apply(batch(("BlockStored", None, [1]), ("BlockStored", "TAPE", [2])))
    pages.apply(batch(("BlockStored", "CPU_PINNED", [1, 3]), ("BlockRemoved", None, [1])))
    assert [pages[one] for one in (DEVICE, HOST, DISK, EXTERNAL)] == [set(), {1, 3}, set(), set()]
    monkeypatch.setattr(replicas, "MAX_KNOWN", 3)
    pages.apply(batch(("BlockStored", "CPU_PINNED", [4, 5])))
    assert pages[HOST] == {1, 3}, "what comes beyond is not known"
    pages.apply(batch(("AllBlocksCleared", None, [])))
    assert len(pages) == 0


@pytest.mark.parametrize(
    ("kept", "held"),
    [
        ((3, 4), ({2, 3, 4, 5}, {20}, {200})),
        ((4,), ({4, 5}, set(), {200})),
        ((), ({5}, set(), {200})),
        (None, ({5}, set(), {200})),
    ],
)
def test_lost_events_forget_memory_but_no_disk(kept: tuple[int, ...] | None, held: Any) -> None:
    """``kept``: which of the lost batches can be replayed; None where there is no replay."""
    stored = "BlockStored"
    second = batch((stored, None, [2]), (stored, "CPU_PINNED", [20]), (stored, "DISK", [200]))
    costs = CostModel(page_tokens=1, bytes_per_token=1, prefill=PrefillCost((1, 1, 1, 1)))
    replica = Replica("http://127.0.0.1:1", ServerState(record_of(costs), 0.0))

    async def scenario() -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as told:
            replays = context.socket(zmq.ROUTER)
            port, again = (one.bind_to_random_port("tcp://127.0.0.1") for one in (told, replays))
            source = EventSource("*", port, replay_port=None if kept is None else again)
            following = asyncio.create_task(replicas.follow_events(context, source, replica))
            assert await told.recv() == b"\1"
            last = batch(("BlockStored", None, [5]))
            # All that there was is asked for at first, then what is missing before a batch.
            for number, payload, asked in ((2, second, [(), ()]), (5, last, [kept or ()])):
                await told.send_multipart([b"", number.to_bytes(8, "big"), payload])
                for lost in [] if kept is None else asked:
                    who, *_ = await replays.recv_multipart()
                    for one in lost:
                        content = [one.to_bytes(8, "big"), batch(("BlockStored", None, [one]))]
                        await replays.send_multipart([who, b"", b"", *content])
                    await replays.send_multipart([who, b"", b"", replicas._END, b""])
                while number not in replica.pages[DEVICE]:
                    await asyncio.sleep(0.01)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            replays.close(0)

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(asyncio.wait_for(scenario(), 30.0))
    assert tuple(replica.pages[one] for one in (DEVICE, HOST, DISK)) == held
