"""What was announced reaches the storage thread, and what never arrives does not stay."""

from __future__ import annotations

import threading

import pytest

from kit.clock import Clock
from sglang_tiered.policy import admission
from sglang_tiered.policy.admission import PendingStore, PendingStores

A, B = b"a" * 16, b"b" * 16


def announced(*operations: str) -> PendingStores:
    """Operations of one-letter pages; one token a page, each chain as long as its pages."""
    table = PendingStores(Clock())
    for pages in operations:
        table.announce_store(pages, num_tokens=len(pages), prefix_tokens=len(pages), tenant=A)
    return table


def test_operation_arrives_with_its_announced_figures() -> None:
    clock = Clock()
    table = PendingStores(clock)
    table.announce_store("abc", num_tokens=192, prefix_tokens=900, tenant=A)
    table.announce_store("de", num_tokens=128, prefix_tokens=128, tenant=B)
    clock.now = 2.5
    assert table.take_store("ab") == PendingStore(("a", "b", "c"), 900, 2.5, 128, A)
    assert table.take_store("ab") is None
    assert table.num_tokens == 128


@pytest.mark.parametrize("call", ["abc", "a", "c", "bc"])
def test_operation_is_known_by_first_or_last_page(call: str) -> None:
    """A window of another pool covers the last pages only."""
    store = announced("xy", "abc").take_store(call)
    assert store is not None and store.hashes == ("a", "b", "c")


def test_operation_that_was_not_announced_takes_nothing() -> None:
    table = announced("abc", "de")
    assert table.take_store("b") is None
    assert len(table) == 2


def test_what_never_arrives_is_forgotten() -> None:
    table = announced("ab", "cde", "fg", "h")
    store = table.take_store("fg")
    assert store is not None and store.tokens_behind == 1
    assert len(table) == 1 and table.num_tokens == 1
    assert table.take_store("ab") is None


def test_chain_that_grew_while_waiting_counts_as_long() -> None:
    table = announced("ab")
    assert table.lengthen_chain("a", 5000) and table.lengthen_chain("a", 100)
    assert not table.lengthen_chain("b", 5000)
    store = table.take_store("ab")
    assert store is not None and store.prefix_tokens == 5000


def test_operation_announced_twice_waits_once() -> None:
    table = announced("ab", "c")
    table.announce_store("abd", num_tokens=30, prefix_tokens=7, tenant=A)
    assert len(table) == 2 and table.num_tokens == 31
    assert table.take_store("ab") == PendingStore(("a", "b", "d"), 7, 0.0, 1, A)
    assert table.take_store("c") is not None, "it keeps its place, and forgets nobody"


def test_node_without_pages_is_no_operation() -> None:
    assert len(announced("")) == 0


def test_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_PENDING_STORES", 5)
    table = announced(*"abcdefghij")
    assert len(table) == 5 and table.num_tokens == 5
    assert table.take_store("e") is None and table.take_store("f") is not None


def test_emptied_queue_leaves_nothing() -> None:
    table = announced("ab", "c")
    table.clear()
    assert len(table) == 0 and table.num_tokens == 0
    assert table.take_store("ab") is None


def test_two_threads_lose_nothing() -> None:
    table = PendingStores(Clock())
    taken: list[int] = []
    count = 2000

    def store() -> None:
        number = 0
        while number < count:
            if table.take_store([f"{number}"]) is not None:
                taken.append(number)
                number += 1

    thread = threading.Thread(target=store, daemon=True)
    thread.start()
    for number in range(count):
        table.announce_store([f"{number}"], num_tokens=3, prefix_tokens=3, tenant=A)
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert taken == list(range(count)) and table.num_tokens == 0


def test_store_of_a_purged_tenant_arrives_as_purged() -> None:
    for tenant, expected in ((A, [None, B]), (B, [A, None]), (None, [None, None])):
        table = PendingStores(Clock())
        table.announce_store("ab", num_tokens=2, prefix_tokens=2, tenant=A)
        table.announce_store("cd", num_tokens=2, prefix_tokens=2, tenant=B)
        table.drop_tenant(tenant)
        stores = [table.take_store("ab"), table.take_store("cd")]
        assert [store.tenant for store in stores if store is not None] == expected
