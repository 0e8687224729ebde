"""Whose turn it is to be sent to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transfer_pair import HOST, TCP, Pool, Shape, indices

from sglang_tiered.transfer.messages import Hello, Open
from sglang_tiered.transfer.prefill.send_queue import Chunk
from sglang_tiered.transfer.prefill.sessions import DecodePeer, DecodePeers
from sglang_tiered.transfer.same_host import Fence

POOL = Pool(Shape(), 1)


@pytest.fixture
def peers() -> Iterator[DecodePeers]:
    made = DecodePeers(
        host=HOST, layout=POOL.layout, memories=POOL.memories, rank=0, settings=TCP, keys=None
    )
    yield made
    made.close()


def admit(peers: DecodePeers, name: bytes) -> DecodePeer:
    peer = peers.admit(name, Hello(name, "", POOL.layout, 2 << 20, False), 0.0)
    peer.links = [name]
    return peer


def add(peer: DecodePeer, room: int) -> None:
    opened = Open(room, 7, 4, [], 0, 1, False, bytes(32))
    peer.sending.add_chunk(opened, Chunk(indices([1]), 0, True), Fence())


class Unsearched(list[Any]):
    """Connections of a peer that there is nothing to send to."""

    def __iter__(self) -> Any:
        raise AssertionError("the connections of an idle peer were gone through")


def test_idle_peers_cost_no_look_at_connections(peers: DecodePeers) -> None:
    idle = [admit(peers, b"idle%d" % number) for number in range(20)]
    for peer in idle:
        peer.links = Unsearched(peer.links)
    busy, other = admit(peers, b"busy"), admit(peers, b"other")
    assert list(peers.take_turns()) == []
    for peer in (busy, other):
        add(peer, 1)
    assert list(peers.take_turns()) == [busy, other]


def test_a_message_to_repeat_takes_its_turn(peers: DecodePeers) -> None:
    """Even when nothing else waits."""
    peer = admit(peers, b"peer")
    add(peer, 1)
    sent = []
    while (parcel := peer.sending.next_parcel()) is not None:
        peer.sending.mark_sent(parcel, 0.0)
        sent.append(parcel)
    assert list(peers.take_turns()) == []
    assert peer.sending.resend(sent[0].key, 0.0)
    assert list(peers.take_turns()) == [peer]
    peer.links = [None]
    assert list(peers.take_turns()) == [], "it has no connection yet"
