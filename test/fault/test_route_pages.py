"""A picker follows real page servers, over a wire that mistreats a message: it knows what they hold
now, without their events and from before it was there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from page_peers import HOST
from peer_servers import NAMESPACE, OTHER, Server
from test_following_wire import MISTREATMENTS, Relay

from kit.cost_records import record_of
from kit.waiting import eventually
from sglang_tiered.policy.cost_model import CostModel, PrefillCost
from sglang_tiered.route import events as following
from sglang_tiered.route.events import PageFollower
from sglang_tiered.route.fleet import Member, Replica
from sglang_tiered.sharing.pages.followers import SIGN_OF_LIFE_S

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


@pytest.fixture
def serving(follower: PageFollower) -> Iterator[Callable[..., tuple[Server, Replica]]]:
    """Opens servers, and replicas of them to be followed, over a relay or not."""
    opened: list[Server | Relay] = []

    def serve(
        pages: range, *, keyed: bool = False, how: str = "", **more: Any
    ) -> tuple[Server, Replica]:
        opened.append(server := Server([], pages, **more))
        port = server.pages.port
        if how:
            opened.append(relay := Relay(port, "changes", MISTREATMENTS[how]))
            port = relay.port
        record = record_of(
            MODEL, pages_at=f"tcp://*:{port}", namespace=NAMESPACE.hex(), server="00", keyed=keyed
        )
        replica = Replica(Member(f"http://{HOST}:1", ""), record, 0)
        replica.following = (follower.start(replica),)
        return server, replica

    yield serve
    for each in reversed(opened):
        each.close()


def held(follower: PageFollower, replica: Replica, pages: range) -> int:
    found = follower.bits(np.array(pages, np.uint64))
    return sum(bool(bits & replica.bit) for bits in found)


Serve = Callable[..., tuple[Server, Replica]]


def test_what_came_and_went_is_known(follower: PageFollower, serving: Serve) -> None:
    one, first = serving(range(1, MANY))
    _, second = serving(range(MANY, MANY + 10))
    everything = range(1, MANY + 10)
    eventually(lambda: held(follower, first, everything) == MANY - 1)
    eventually(lambda: held(follower, second, everything) == 10)
    one.hold(range(5, MANY + 5))
    eventually(lambda: held(follower, first, range(1, 5)) == 0)
    eventually(lambda: held(follower, first, everything) == MANY)
    first.following[0].cancel()
    eventually(lambda: held(follower, first, everything) == 0)
    assert held(follower, second, everything) == 10


@pytest.mark.parametrize("how", MISTREATMENTS)
def test_mistreated_answer_is_asked_for_again(
    follower: PageFollower, serving: Serve, how: str
) -> None:
    server, replica = serving(range(1, 100), how=how)
    eventually(lambda: held(follower, replica, range(1, 200)) == 99)
    server.hold(range(50, 200))
    eventually(lambda: held(follower, replica, range(1, 50)) == 0)
    eventually(lambda: held(follower, replica, range(1, 200)) == 150)


def test_pages_of_other_weights_or_keys_are_unknown(follower: PageFollower, serving: Serve) -> None:
    """With keys nobody is asked: the key that lets ask opens pages too."""
    _, wrong = serving(range(1, 100), namespace=OTHER)
    _, keyed = serving(range(1, 100), keyed=True)
    same, right = serving(range(1, 100))
    eventually(lambda: held(follower, right, range(1, 100)) == 99)
    assert held(follower, wrong, range(1, 100)) == held(follower, keyed, range(1, 100)) == 0
    same.set_namespace(OTHER)
    eventually(lambda: held(follower, right, range(1, 100)) == 0)


def test_too_many_pages_are_left_out(follower: PageFollower, serving: Serve) -> None:
    follower._mirror.max_pages = 50
    server, large = serving(range(1, 100))
    _, small = serving(range(1, 20))
    eventually(lambda: held(follower, small, range(1, 100)) == 19)
    eventually(lambda: large.known is not None and large.known.is_cut)
    assert held(follower, large, range(1, 100)) == 0
    server.hold(range(1, 21))
    eventually(lambda: held(follower, large, range(1, 100)) == 20)
