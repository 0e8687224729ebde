"""A picker follows real page servers, over a wire that mistreats a message: it knows what they hold
now, without their events and from before it was there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from page_peers import HOST
from peer_servers import NAMESPACE, OTHER, Server
from test_following_wire import MISTREATMENTS, Relay

from kit.cost_records import record_of
from kit.waiting import eventually
from sglang_tiered.policy.cost_model import CostModel, PrefillCost
from sglang_tiered.route import following
from sglang_tiered.route.fleet import Member, Replica
from sglang_tiered.route.following import PageFollower
from sglang_tiered.sharing.pages.followers import SIGN_OF_LIFE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(120)

MODEL = CostModel(page_tokens=1, bytes_per_token=1, prefill=PrefillCost((1, 1, 1), token_bytes=1))
MANY = 150_000
"""More than two messages hold."""


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch) -> Iterator[PageFollower]:
    monkeypatch.setattr(following, "AGAIN_S", 0.05)
    monkeypatch.setattr(following, "SILENCE_S", SIGN_OF_LIFE_S + 1)
    made = PageFollower()
    yield made
    made.close()
    made._mirror.check_integrity()


def replica_at(port: int, *, keyed: bool = False) -> Replica:
    record = record_of(
        MODEL, pages_at=f"tcp://*:{port}", namespace=NAMESPACE.hex(), server="00", keyed=keyed
    )
    return Replica(Member(f"http://{HOST}:1", ""), record, 0)


def held(follower: PageFollower, replica: Replica, pages: range) -> int:
    found = follower.bits(np.array(pages, np.uint64))
    return sum(bool(bits & replica.bit) for bits in found)


def test_what_came_and_went_is_known(follower: PageFollower) -> None:
    one, other = Server([], range(1, MANY)), Server([], range(MANY, MANY + 10))
    first, second = (replica_at(each.pages.port) for each in (one, other))
    everything = range(1, MANY + 10)
    try:
        work = [follower.start(each) for each in (first, second)]
        eventually(lambda: held(follower, first, everything) == MANY - 1)
        eventually(lambda: held(follower, second, everything) == 10)
        one.hold(range(5, MANY + 5))
        eventually(lambda: held(follower, first, range(1, 5)) == 0)
        eventually(lambda: held(follower, first, everything) == MANY)
        work[0].cancel()
        eventually(lambda: held(follower, first, everything) == 0)
        assert held(follower, second, everything) == 10
    finally:
        one.close()
        other.close()


@pytest.mark.parametrize("name", MISTREATMENTS)
def test_mistreated_answer_is_asked_for_again(follower: PageFollower, name: str) -> None:
    server = Server([], range(1, 100))
    relay = Relay(server.pages.port, "changes", MISTREATMENTS[name])
    replica = replica_at(relay.port)
    try:
        follower.start(replica)
        eventually(lambda: held(follower, replica, range(1, 200)) == 99)
        server.hold(range(50, 200))
        eventually(lambda: held(follower, replica, range(1, 50)) == 0)
        eventually(lambda: held(follower, replica, range(1, 200)) == 150)
        assert relay.num_mistreated == 1
    finally:
        relay.close()
        server.close()


def test_pages_of_other_weights_or_keys_are_unknown(follower: PageFollower) -> None:
    """With keys nobody is asked: the key that lets ask opens pages too."""
    server = Server([], range(1, 100), namespace=OTHER)
    wrong, keyed = replica_at(server.pages.port), replica_at(server.pages.port, keyed=True)
    same = Server([], range(1, 100))
    right = replica_at(same.pages.port)
    try:
        for each in (wrong, keyed, right):
            follower.start(each)
        eventually(lambda: held(follower, right, range(1, 100)) == 99)
        assert held(follower, wrong, range(1, 100)) == held(follower, keyed, range(1, 100)) == 0
        same.sync.set_namespace(OTHER)
        same.pages.set_namespace(OTHER)
        eventually(lambda: held(follower, right, range(1, 100)) == 0)
    finally:
        server.close()
        same.close()


def test_too_many_pages_are_left_out(
    follower: PageFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower._mirror._max_pages = 50
    monkeypatch.setattr(following, "AGAIN_BEYOND_S", 0.2)
    server, small = Server([], range(1, 100)), Server([], range(1, 20))
    replicas = [replica_at(each.pages.port) for each in (server, small)]
    try:
        for each in replicas:
            follower.start(each)
        eventually(lambda: held(follower, replicas[1], range(1, 100)) == 19)
        assert held(follower, replicas[0], range(1, 100)) == 0
        server.hold(range(1, 40))
        eventually(lambda: held(follower, replicas[0], range(1, 100)) == 39)
    finally:
        server.close()
        small.close()
