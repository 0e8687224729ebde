"""Whose turn it is, and what is too much."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from sglang_tiered.sharing.pages import messages
from sglang_tiered.sharing.pages.server import ServeQueue, ServeRequest
from sglang_tiered.sharing.settings import PageSettings

SETTINGS = PageSettings(max_serving_bytes=1000, max_queued_bytes=4000)
MAX_WAITING = 64


def request(
    client: bytes, number: int, num_bytes: int = 100, expires_at: float = 9.0, num_pages: int = 0
) -> ServeRequest:
    fetch = messages.Fetch(number, bytes(32), b"", [], 1)
    return ServeRequest(client, fetch, [b"k"] * num_pages, num_bytes, expires_at)


def test_clients_take_turns() -> None:
    queue = ServeQueue(SETTINGS)
    for number in range(3):
        assert queue.add_request(request(b"a", number))
    assert queue.add_request(request(b"b", 0))
    taken = []
    while (found := queue.next_request()) is not None:
        taken.append((found.client, found.fetch.number))
        queue.release_memory(found)
    assert taken == [(b"a", 0), (b"b", 0), (b"a", 1), (b"a", 2)]
    assert not queue._waiting + queue._held


@pytest.mark.parametrize("seed", range(8))
def test_a_queue_takes_and_gives_what_fits(seed: int) -> None:
    """As a list would that is looked through for each answer. A request beyond a bound is served
    alone; a client has half of the memory, and a quarter of what waits."""
    source = random.Random(seed)
    queue = ServeQueue(SETTINGS)
    waiting: dict[bytes, list[ServeRequest]] = defaultdict(list)
    held: list[ServeRequest] = []

    def fits(used: list[ServeRequest], size: int, most: int, cost: str) -> bool:
        total = sum(getattr(each, cost) for each in used)
        return not used or total + size <= most

    for number in range(2500):
        name = bytes([source.randrange(6)])
        match source.randrange(7):
            case 0 | 1 | 2:
                num_pages = source.choice([0, 0, 0, 3])
                size = source.choice([1, source.randrange(1, 600), 1, 3000])
                one = request(name, number, size, number + source.randrange(900), num_pages)
                everything = [each for some in waiting.values() for each in some]
                taken = (
                    len(waiting[name]) < MAX_WAITING
                    and fits(waiting[name], one.cost, 1000, "cost")
                    and fits(everything, one.cost, 4000, "cost")
                )
                assert queue.add_request(one) == taken
                waiting[name] += [one] if taken else []
            case 3 | 4:
                ready = {
                    client
                    for client, some in waiting.items()
                    if some
                    and fits(held, some[0].num_bytes, 1000, "num_bytes")
                    and fits(
                        [each for each in held if each.client == client],
                        some[0].num_bytes,
                        500,
                        "num_bytes",
                    )
                }
                found = queue.next_request()
                assert (found is None) == (not ready)
                if found is not None:
                    assert found.client in ready and found is waiting[found.client].pop(0)
                    held.append(found)
            case 5 if held:
                queue.release_memory(held.pop(source.randrange(len(held))))
            case 6 if source.random() < 0.1:
                assert queue.drop_client(name) == len(waiting.pop(name, []))
        expired = [each for some in waiting.values() for each in some if each.expires_at <= number]
        waiting = defaultdict(
            list, {n: [one for one in some if one not in expired] for n, some in waiting.items()}
        )
        assert {each.fetch.number for each in queue.expire(number)} == {
            each.fetch.number for each in expired
        }
        assert queue.num_waiting == sum(map(len, waiting.values()))
        assert queue.held_bytes == sum(each.num_bytes for each in held)
    for one in held:
        queue.release_memory(one)
    assert queue.held_bytes == 0
