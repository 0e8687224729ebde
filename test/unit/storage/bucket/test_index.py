"""The index keeps its books, whatever goes."""

from __future__ import annotations

import random

from sglang_tiered.storage.bucket.index import BucketIndex
from sglang_tiered.storage.bucket.names import PageName

A, B = b"a" * 16, b"b" * 16


def key(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def page(number: int, unix_s: int = 0, tenant: bytes = A) -> PageName:
    return PageName(key(number), tenant, 100, number % 7, unix_s or number, number * 11)


def index(max_pages: int = 1000, **bounds: int) -> BucketIndex:
    pinned = {key(999)}
    return BucketIndex(
        max_pages, bounds.get("capacity_bytes"), bounds.get("max_tenant_bytes"), pinned.__contains__
    )


def put(table: BucketIndex, name: PageName, num_bytes: int) -> None:
    table.put(name._replace(length=num_bytes))


def held(table: BucketIndex, *numbers: int) -> list[int]:
    keys = [key(number) for number in numbers]
    return [n for n, is_held in zip(numbers, table.holds(keys), strict=True) if is_held]


def test_a_sweep_takes_what_no_listing_showed() -> None:
    """Not what was put since it began, in whatever way, nor what an earlier one that failed saw."""
    table = index()
    for number in range(10):
        put(table, page(number), 10)
    table.begin_listing()
    table.put(page(1)._replace(length=10), is_listed=True)  # and it fails
    table.begin_listing()
    for number in (2, 3, 20):
        table.put(page(number)._replace(length=10), is_listed=number < 9)
    assert table.sweep(table.keys()[:5], unseen=True) == 3
    assert table.sweep(table.keys(), unseen=True) == 5
    assert held(table, *range(30)) == [2, 3, 20]
    table.check_integrity()


def test_an_erased_tenant_hides_and_goes_later() -> None:
    table = index()
    for number in range(20):
        put(table, page(number, tenant=(A, B)[number % 2]), 10)
    assert table.drop_tenant(A) == 10
    assert table.drop_tenant(A) == 0
    assert held(table, *range(20)) == list(range(1, 20, 2))
    assert table.num_pages == 10
    table.check_integrity()
    put(table, page(4), 10)
    assert held(table, 2, 4) == [4], "what is stored since counts"
    assert table.sweep(table.keys()) == table.num_dead == 0
    assert len(table._rows) == 11
    table.check_integrity()


def test_random_histories_keep_the_books() -> None:
    source = random.Random(7)
    table = index(max_pages=200, capacity_bytes=15_000, max_tenant_bytes=8000)
    for step in range(4000):
        choice, number = source.randrange(10), source.randrange(300)
        if choice < 6:
            tenant = source.choice((A, B, bytes(16), number.to_bytes(16, "big")))
            put(table, page(number, source.randrange(1, 500), tenant), source.randrange(1, 300))
        elif choice == 6:
            table.drop(key(number))
        elif choice == 7 and step % 5 == 0:
            table.drop_tenant(source.choice((A, B)))
        elif choice == 8:
            table.sweep(source.sample(table.keys(), min(len(table.keys()), 20)))
        elif step % 100 == 0:
            table.clear()
        if step % 50 == 0:
            table.check_integrity()
    table.check_integrity()
