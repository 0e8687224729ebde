"""The index forgets whole objects, the oldest first, and keeps its books."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kit.runs import NAMESPACE
from sglang_tiered.storage.object.format import Manifest, page_table
from sglang_tiered.storage.object.index import ObjectIndex
from sglang_tiered.storage.object.names import ObjectId, tenant_tag

A, B = b"a" * 16, b"b" * 16


def key(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def manifest(ms: int, keys: list[int], tenant: bytes = A, length: int = 100) -> Manifest:
    rows = [(key(k), i * length, length, length, k) for i, k in enumerate(keys)]
    object_id = ObjectId(ms, 1, ms % 1000, tenant_tag(tenant))
    return Manifest(object_id, NAMESPACE, tenant, "none", page_table(rows), length * len(keys))


def index(max_pages: int = 1000, **bounds: int | None) -> ObjectIndex:
    return ObjectIndex(max_pages, bounds.get("capacity_bytes"), bounds.get("max_tenant_bytes"))


def held(table: ObjectIndex, *keys: int) -> list[bool]:
    return table.holds([key(k) for k in keys])


def test_places_come_back_byte_by_byte() -> None:
    table = index()
    table.put(manifest(5, [1, 2, 3], length=77))
    places = table.find([key(2), key(9), key(3)])
    assert [(p.position, p.offset, p.stored, p.length, p.checksum) for p in places] == [
        (0, 77, 77, 77, 2),
        (2, 154, 77, 77, 3),
    ]
    table.check_integrity()


def test_the_oldest_go_first_whatever_came_first() -> None:
    table = index(max_pages=64)
    for ms in (30, 10, 40, 20):
        table.put(manifest(ms, list(range(ms * 100, ms * 100 + 20))))
    assert held(table, 1000, 2000, 3000, 4000) == [False, True, True, True]
    assert not table.accepts(str(manifest(15, [1]).object_id))
    assert table.accepts(str(manifest(50, [1]).object_id))
    assert table.num_pages_evicted == 20
    table.check_integrity()


def test_objects_of_one_page_are_bounded_too() -> None:
    table = index(max_pages=20_000)
    for ms in range(1, 1500):
        table.put(manifest(ms, [ms]))
    assert table.num_objects <= max(20_000 // 16, 1024)
    table.check_integrity()


def test_a_cap_of_bytes_counts_whole_objects() -> None:
    size = manifest(1, [1, 2]).object_bytes
    table = index(capacity_bytes=3 * size)
    for ms in range(1, 6):
        table.put(manifest(ms, [10 * ms, 10 * ms + 1]))
    assert table.object_bytes == 3 * size
    assert held(table, 20, 30) == [False, True]


def test_a_tenants_share_costs_no_other_tenant() -> None:
    size = manifest(1, [1]).object_bytes
    table = index(max_tenant_bytes=2 * size)
    table.put(manifest(1, [100], tenant=B))
    for ms in range(2, 6):
        table.put(manifest(ms, [ms]))
    assert held(table, 100, 2, 3, 4, 5) == [True, False, False, True, True]
    assert not table.accepts(str(manifest(3, [3]).object_id))
    assert table.accepts(str(manifest(2, [3], tenant=B).object_id))
    table.check_integrity()


def test_a_purge_hides_one_tenant_and_sweeps_later() -> None:
    table = index()
    table.put(manifest(1, [1, 2]))
    table.put(manifest(2, [3], tenant=B))
    assert table.drop_tenant(A) == 2
    assert held(table, 1, 2, 3) == [False, False, True]
    table.put(manifest(3, [1]))
    while not table.sweep(1):
        table.check_integrity()
    assert held(table, 1, 2, 3) == [True, False, True]
    assert [entry.num_pages for entry in table.usage() if entry.tenant == A] == [1]
    table.check_integrity()


def test_a_purge_up_to_a_time_spares_younger() -> None:
    table = index()
    table.put(manifest(10, [1]))
    table.put(manifest(20, [2]))
    table.put(manifest(10, [3], tenant=B))
    assert table.drop_before(A, 10) == 1
    assert held(table, 1, 2, 3) == [False, True, True]
    assert table.drop_before(None, 10) == 1
    assert held(table, 2, 3) == [True, False]
    assert table.drop_before(A, 99) == 1
    table.check_integrity()


def test_a_page_is_dropped_only_where_found() -> None:
    table = index()
    table.put(manifest(1, [1]))
    (old,) = table.find([key(1)])
    table.put(manifest(2, [1]))
    table.drop_page(key(1), old)
    assert held(table, 1) == [True]
    (new,) = table.find([key(1)])
    table.drop_page(key(1), new)
    assert held(table, 1) == [False]
    table.check_integrity()


def test_of_two_objects_with_a_key_younger_wins() -> None:
    table = index()
    table.put(manifest(20, [1, 2]))
    table.put(manifest(10, [1, 3]))
    table.put(manifest(30, [3]))
    found = table.find([key(1), key(2), key(3)])
    assert [int(place.held.name[:12], 16) for place in found] == [20, 20, 30]
    table.put(manifest(5, [1, 2]))
    table.check_integrity()
    table.drop_objects([str(manifest(20, [1]).object_id)])
    assert held(table, 1, 2, 3) == [False, False, True]
    table.check_integrity()


def test_what_expired_comes_off_the_end() -> None:
    table = index()
    for ms in (5, 9, 7):
        table.put(manifest(ms, [ms]))
    gone = table.expired(f"{8:012x}")
    assert table.drop_objects(gone) == 2
    assert held(table, 5, 7, 9) == [False, False, True]
    table.check_integrity()


def test_random_histories_keep_the_books() -> None:
    source = random.Random(7)
    table = index(max_pages=200, capacity_bytes=40_000, max_tenant_bytes=20_000)
    names: list[str] = []
    for step in range(400):
        choice = source.randrange(10)
        if choice < 6:
            tenant = source.choice((A, B, bytes(16)))
            made = manifest(
                source.randrange(1000), source.sample(range(300), source.randrange(1, 30)), tenant
            )
            if table.accepts(str(made.object_id)):
                table.put(made)
                names.append(str(made.object_id))
        elif choice == 6:
            table.drop_objects(source.sample(names, min(len(names), 3)))
        elif choice == 7:
            table.drop_tenant(source.choice((A, B)))
        elif choice == 8:
            table.sweep(source.randrange(100))
        else:
            table.drop_before(source.choice((A, B, None)), source.randrange(300))
        if step % 10 == 0:
            table.check_integrity()
    table.check_integrity()


@pytest.mark.parametrize("num_pages", [40_000])
def test_a_page_takes_less_than_130_bytes(num_pages: int) -> None:
    import tracemalloc

    per_object = 200
    keys = np.frombuffer(random.Random(1).randbytes(num_pages * 32), "V32")
    table = index(max_pages=num_pages)
    tracemalloc.start()
    try:
        for number in range(num_pages // per_object):
            pages = np.zeros(per_object, manifest(1, [1]).pages.dtype)
            pages["key"] = keys[number * per_object : (number + 1) * per_object]
            pages["offset"] = np.arange(per_object) * 10
            pages["stored"] = pages["length"] = 10
            object_id = ObjectId(number, 1, number, tenant_tag(A))
            table.put(Manifest(object_id, NAMESPACE, A, "none", pages, 10 * per_object))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(table) == num_pages
    assert taken / num_pages < 130, f"{taken / num_pages:.0f} bytes a page"
