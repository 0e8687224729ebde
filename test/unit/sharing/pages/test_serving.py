"""Whose turn it is, and what is too much."""

from __future__ import annotations

import random

from sglang_tiered.sharing.pages.server import Place, _payload
from sglang_tiered.sharing.pages.serving import ServeQueue, ServeRequest
from sglang_tiered.sharing.pages.settings import PageSettings

SETTINGS = PageSettings(max_serving_bytes=1000, max_queued_bytes=4000)


def request(
    client: bytes, number: int, num_bytes: int = 100, expires_at: float = 9.0
) -> ServeRequest:
    return ServeRequest(client, number, b"", [], [], num_bytes, expires_at)


def take_all(queue: ServeQueue, now: float = 0.0) -> list[tuple[bytes, int]]:
    taken = []
    while (found := queue.next_request(now)) is not None:
        taken.append((found.client, found.number))
        queue.release_memory(found)
    return taken


def test_clients_take_turns() -> None:
    queue = ServeQueue(SETTINGS)
    for number in range(3):
        assert queue.add_request(request(b"a", number))
    assert queue.add_request(request(b"b", 0))
    assert take_all(queue) == [(b"a", 0), (b"b", 0), (b"a", 1), (b"a", 2)]
    assert queue.num_clients == 0


def test_greedy_client_holds_half_the_memory() -> None:
    queue = ServeQueue(SETTINGS)
    for number in range(8):
        queue.add_request(request(b"a", number))
    held = [queue.next_request(0.0) for _ in range(5)]
    assert queue.next_request(0.0) is None
    queue.add_request(request(b"b", 1))
    other = queue.next_request(0.0)
    assert other is not None
    assert other.client == b"b"
    queue.release_memory(held[0])  # type: ignore[arg-type]
    assert queue.next_request(0.0) is not None
    queue.check_integrity()


def test_all_clients_hold_no_more_than_the_memory() -> None:
    queue = ServeQueue(SETTINGS)
    for name in (b"a", b"b", b"c"):
        for number in range(6):
            queue.add_request(request(name, number))
    while queue.next_request(0.0) is not None:
        pass
    assert queue.held_bytes == 1000
    queue.check_integrity()


def test_request_beyond_the_memory_is_served_alone() -> None:
    queue = ServeQueue(SETTINGS)
    assert queue.add_request(request(b"a", 1, 3000))
    assert queue.add_request(request(b"b", 1, 10))
    large = queue.next_request(0.0)
    assert large is not None
    assert queue.next_request(0.0) is None
    queue.release_memory(large)
    assert queue.next_request(0.0) is not None


def test_waiting_requests_are_bounded() -> None:
    queue = ServeQueue(SETTINGS)
    accepted = [queue.add_request(request(b"a", number)) for number in range(20)]
    assert accepted == [True] * 10 + [False] * 10
    for name in (b"b", b"c", b"d", b"e", b"f"):
        for number in range(20):
            queue.add_request(request(name, number))
    assert queue.waiting_bytes == 4000
    assert not queue.add_request(request(b"g", 1))
    tiny = [queue.add_request(request(b"h", number, 0)) for number in range(100)]
    assert tiny.count(True) == 64, "in number, too"
    queue.check_integrity()


def test_many_tiny_pages_count_by_their_keys() -> None:
    queue = ServeQueue(PageSettings(max_queued_bytes=400_000))
    accepted = 0
    for number in range(1000):
        tiny = ServeRequest(bytes([number % 100]), number, b"", [b"k"] * 50, [1] * 50, 50, 9.0)
        accepted += queue.add_request(tiny)
    assert accepted <= 400_000 // 50_000
    queue.check_integrity()
    while (found := queue.next_request(0.0)) is not None:
        queue.release_memory(found)
    assert queue.waiting_bytes == queue.held_bytes == 0


def test_expired_request_is_dropped_unread() -> None:
    queue = ServeQueue(SETTINGS)
    queue.add_request(request(b"a", 1, expires_at=1.0))
    queue.add_request(request(b"a", 2, expires_at=3.0))
    queue.add_request(request(b"b", 1, expires_at=1.0))
    assert take_all(queue, now=2.0) == [(b"a", 2)]
    assert [(found.client, found.number) for found in queue.expired] == [(b"a", 1), (b"b", 1)]
    assert queue.num_clients == queue.num_waiting == queue.waiting_bytes == 0


def test_the_books_balance_whatever_happens() -> None:
    source = random.Random(1)
    queue = ServeQueue(SETTINGS)
    held: list[ServeRequest] = []
    for number in range(5000):
        name = bytes([source.randrange(5)])
        match source.randrange(6):
            case 0 | 1:
                queue.add_request(
                    request(name, number, 1 + source.randrange(600), source.random() * 9)
                )
            case 2 | 3:
                found = queue.next_request(source.random() * 9)
                held += [found] if found is not None else []
            case 4 if held:
                queue.release_memory(held.pop(source.randrange(len(held))))
            case 5:
                queue.drop_client(name) if source.random() < 0.1 else queue.cancel_request(
                    name, number - 9
                )
        queue.check_integrity()
    for one in held:
        queue.release_memory(one)
    assert queue.held_bytes == 0


class Read:
    def __init__(self, data: bytes, places: list[Place | None]) -> None:
        self.data = memoryview(data)
        self.places = places

    def release(self) -> None: ...


def test_adjacent_pages_share_bounded_frames() -> None:
    size = 700_000
    data = random.Random(2).randbytes(4 * size)
    places = [Place(0, size, 1), Place(size, size, 2), None, Place(3 * size, size - 5, 3)]
    frames = _payload(Read(data, places))
    assert [frame.nbytes for frame in frames] == [1 << 20, 2 * size - (1 << 20), size - 5]
    assert b"".join(frames) == data[: 2 * size] + data[3 * size : 4 * size - 5]


def test_padding_between_pages_is_not_sent() -> None:
    data = bytes(range(200)) * 50
    read = Read(data, [Place(0, 100, 1), Place(4096, 50, 2), Place(8192, 1, 3)])
    assert [bytes(frame) for frame in _payload(read)] == [
        data[:100],
        data[4096:4146],
        data[8192:8193],
    ]
    assert _payload(Read(data, [None, None])) == []
