"""The index keeps its books, whatever goes; names are those of the format."""

from __future__ import annotations

import random

import pytest

from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.bucket.erased import record_path
from sglang_tiered.storage.bucket.index import BucketIndex
from sglang_tiered.storage.bucket.names import Layout, PageName, parse_page

A, B = b"a" * 16, b"b" * 16


def key(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def page(number: int, tenant: bytes = A) -> PageName:
    return PageName(key(number), tenant, 10, number % 7, number, number * 11)


def index() -> BucketIndex:
    return BucketIndex(1000, None, None, lambda _: False)


def held(table: BucketIndex, *numbers: int) -> list[int]:
    keys = [key(number) for number in numbers]
    return [n for n, is_held in zip(numbers, table.holds(keys), strict=True) if is_held]


def test_more_pages_take_no_more_memory() -> None:
    """The oldest go, but none that is pinned."""
    table = BucketIndex(4, None, None, {key(999)}.__contains__)
    for number in (999, *range(10)):
        table.put(page(number))
    assert held(table, 999, *range(10)) == [999, 7, 8, 9]
    table.check_integrity()


def test_a_sweep_takes_what_no_listing_showed() -> None:
    """Not what was put since it began, in whatever way, nor what an earlier one that failed saw."""
    table = index()
    for number in range(10):
        table.put(page(number))
    table.begin_listing()
    table.put(page(1), is_listed=True)  # and it fails
    table.begin_listing()
    for number in (2, 3, 20):
        table.put(page(number), is_listed=number < 9)
    table.sweep(table.keys()[:5], unseen=True)
    assert held(table, *range(30)) == [2, 3, *range(5, 10), 20]
    table.sweep(table.keys(), unseen=True)
    assert held(table, *range(30)) == [2, 3, 20]
    table.check_integrity()


def test_what_is_over_age_goes_without_a_listing() -> None:
    """Some at a time, and none that is pinned; that is no eviction."""
    table = BucketIndex(5000, None, None, {key(1)}.__contains__)
    for number in range(2500):
        table.put(page(number))
    assert [table.expire(2400) for _ in range(4)] == [True, True, True, False]
    assert table.num_pages == 101
    assert held(table, 0, 1, 2399, 2400) == [1, 2400]
    assert table.num_pages_evicted == 0
    table.check_integrity()


def test_an_erased_tenant_hides_and_goes_later() -> None:
    table = index()
    for number in range(20):
        table.put(page(number, (A, B)[number % 2]))
    assert table.drop_tenant(A) == 10
    assert table.drop_tenant(A) == 0
    assert held(table, *range(20)) == list(range(1, 20, 2))
    assert table.num_pages == 10
    table.check_integrity()
    table.put(page(4))
    assert held(table, 2, 4) == [4], "what is stored since counts"
    table.sweep(table.keys())
    assert table.num_dead == 0
    assert len(table._rows) == 11
    table.check_integrity()


LAYOUT = Layout(b"\x11" * 32)
PAGE = PageName(b"\xa1" * 32, b"\x22" * 16, 8 << 20, 7, 1_700_000_000, 0xDEADBEEF)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-", "_"),
        ("a1a1", "A1a1"),
        ("2023111422", "2023131422"),
        ("2023111422", "9999111422"),
        ("2023111422", "1969111422"),
        ("/1320", "/6020"),
        ("deadbeef", ""),
    ],
)
def test_a_name_that_is_not_ours_is_nothing(old: str, new: str) -> None:
    path = PAGE.path(LAYOUT)
    assert old in path
    assert parse_page(path.replace(old, new)) is None
    assert parse_page(path + "#1") is None


def test_names_are_those_of_version_2() -> None:
    what = Erasure(tenant=b"\x22" * 16, id=b"\xab" * 16)
    folder = f"v2/{'11' * 32}"
    page = f"{folder}/pages/2023111422/1320-7-{'22' * 16}-{'a1' * 32}-800000-00000000deadbeef"
    assert PAGE.path(LAYOUT) == page
    assert record_path(7, what, b"") == f"v2/erased/000000000007-{'ab' * 16}-t{'22' * 16}"
    assert LAYOUT.pin("a") == f"{folder}/pins/27c35e6e9373877f29e562464e46497e"
