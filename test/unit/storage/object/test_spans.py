"""Neighbouring pages are read together, and no request is longer than its share."""

from __future__ import annotations

from sglang_tiered.storage.object.index import HeldObject, Place
from sglang_tiered.storage.object.loading import plan_spans

MIB = 1 << 20
ONE, OTHER = (HeldObject(name, i, bytes(16), 0, 1 << 30) for i, name in enumerate(("a", "b")))


def place(position: int, offset: int, stored: int, held: HeldObject = ONE) -> Place:
    return Place(position, held, offset, stored, 0)


def ranges(places: list[Place], gap: int = 0, num_connections: int = 1) -> list[tuple[int, int]]:
    spans = plan_spans(
        places, gap_bytes=gap, max_span_bytes=8 * MIB, num_connections=num_connections
    )
    return [(start, end) for start, end, _ in spans]


def test_adjacent_pages_are_one_request_whatever_their_order() -> None:
    assert ranges([place(0, 200, 100), place(1, 0, 100), place(2, 100, 100)]) == [(0, 300)]


def test_a_gap_cheaper_than_a_request_is_read() -> None:
    places = [place(0, 0, 100), place(1, 150, 100)]
    assert ranges(places, gap=49) == [(0, 100), (150, 250)]
    assert ranges(places, gap=50) == [(0, 250)]


def test_objects_are_never_read_together() -> None:
    spans = plan_spans(
        [place(0, 0, 100), place(1, 100, 100, OTHER), place(2, 100, 100)],
        gap_bytes=MIB,
        max_span_bytes=8 * MIB,
        num_connections=1,
    )
    assert [[p.position for p in group] for _, _, group in spans] == [[0, 2], [1]]


def test_a_long_chain_is_spread_over_the_connections() -> None:
    places = [place(i, i * MIB, MIB) for i in range(32)]
    assert len(ranges(places, num_connections=8)) == 8
    assert len(ranges(places, num_connections=1)) == 4, "8 MiB at most are held by a connection"
    assert len(ranges(places[:2], num_connections=8)) == 1, "small requests are not worth it"


def test_a_page_beyond_the_limit_is_one_request() -> None:
    assert ranges([place(0, 0, 64 * MIB), place(1, 64 * MIB, 10)]) == [
        (0, 64 * MIB),
        (64 * MIB, 64 * MIB + 10),
    ]


def test_every_page_is_in_exactly_one_span() -> None:
    places = [place(i, (i * 7919) % 5000 * 1000, 900) for i in range(300)]
    spans = plan_spans(places, gap_bytes=2000, max_span_bytes=8 * MIB, num_connections=4)
    seen = sorted(p.position for _, _, group in spans for p in group)
    assert seen == list(range(300))
    for start, end, group in spans:
        assert start == min(p.offset for p in group)
        assert end == max(p.offset + p.stored for p in group)
