"""The book of purges: every server comes to know the same, and nothing is told too little."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tiered.sharing.locality import purges
from sglang_tiered.sharing.locality.formats import Purge, pack_purge
from sglang_tiered.sharing.locality.purges import PurgeBook
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.promises import is_true

if TYPE_CHECKING:
    import pytest

NAMESPACE, OTHER = bytes(32), b"o" * 32
TENANT = b"t" * 16
RETENTION_S = 1000.0


class World:
    def __init__(self) -> None:
        self.now = 50.0

    def book(self) -> PurgeBook:
        return PurgeBook(NAMESPACE, RETENTION_S, lambda: self.now)


def member(number: int) -> bytes:
    return pack_purge(Purge(number.to_bytes(16, "big"), TENANT))


def test_purge_is_due_until_published() -> None:
    world = World()
    book = world.book()
    purge = book.begin(Erasure(tenant=TENANT))
    world.now += 3.0
    (due,) = book.due(10)
    assert (due.namespace, due.age_s) == (NAMESPACE, 3.0)
    assert not purge.done()
    assert not is_true(purge, 0.0)
    book.told([due])
    assert purge.done()
    assert is_true(purge, 0.0)
    assert book.due(10) == []
    assert book.num_told == 1
    book.check_integrity()


def test_digest_does_not_depend_on_order() -> None:
    world = World()
    one, two = world.book(), world.book()
    before = one.digest
    for number in (1, 2, 3):
        one.applied(member(number), 0.0)
    for number in (3, 1):
        two.applied(member(number), 9.0)
    assert one.digest != two.digest
    two.applied(member(2), 0.0)
    two.applied(member(2), 0.0)
    assert one.digest == two.digest != before
    one.check_integrity()


def test_purges_lost_by_redis_are_published_again() -> None:
    world = World()
    book = world.book()
    book.applied(member(1), age_s=100.0)
    book.compare({member(1)})
    assert book.due(10) == []
    world.now += 50.0
    book.compare(set())
    (due,) = book.due(10)
    assert (due.member, due.age_s) == (member(1), 150.0)
    book.compare({member(1)})  # another server was quicker
    assert book.due(10) == []


def test_only_old_purges_lost_by_redis_are_forgotten() -> None:
    world = World()
    book = world.book()
    empty = book.digest
    book.applied(member(1), 0.0)
    world.now += RETENTION_S + 1.0
    book.compare({member(1)})
    assert len(book) == 1
    book.compare(set())
    assert len(book) == 0
    assert book.digest == empty
    assert book.due(10) == []
    book.check_integrity()


def test_purge_of_the_old_namespace_is_still_published() -> None:
    world = World()
    book = world.book()
    purge = book.begin(Erasure())
    empty = world.book().digest
    book.change_namespace(OTHER)
    assert book.digest == empty
    (due,) = book.due(10)
    assert due.namespace == NAMESPACE
    book.compare(set())
    book.told([due])
    assert is_true(purge, 0.0)
    book.check_integrity()


def test_the_book_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purges, "MAX_PURGES", 5)
    world = World()
    book = world.book()
    told = []
    for _ in range(12):
        world.now += 1.0
        told.append(book.begin(Erasure(tenant=TENANT)))
        book.check_integrity()
    assert len(book) == book.num_due == 5
    assert [purge.done() for purge in told] == [True] * 7 + [False] * 5
    assert not any(is_true(purge, 0.0) for purge in told)


def test_unpublished_forgets_keep_their_keys() -> None:
    world = World()
    book = world.book()
    forgets = [book.begin(Erasure((number.to_bytes(32, "big"),))) for number in range(600)]
    due = book.due(1000)
    assert len(due) == 600
    assert all(each.keys for each in due)
    book.check_integrity()
    book.told(due)
    book.compare({each.member for each in due})
    book.agreed(book.digest)
    assert all(is_true(forget, 0.0) for forget in forgets)
    book.check_integrity()


def test_forgets_beyond_the_bound_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purges, "MAX_DUE_KEPT", 5)
    monkeypatch.setattr(purges, "MAX_KEPT", 2)
    world = World()
    book = world.book()
    forgets = [book.begin(Erasure((number.to_bytes(32, "big"),))) for number in range(8)]
    book.change_namespace(OTHER)
    book.begin(Erasure((bytes(32),)))
    assert [forget.done() for forget in forgets[:3]] == [True] * 3
    assert not is_true(forgets[0], 0.0)
    assert len(book.due(20)) == 5
    book.check_integrity()
    # One forget may be more than the bound by itself.
    too_long = book.begin(Erasure.of(number.to_bytes(32, "big") for number in range(6 * 1024)))
    assert too_long.done()
    assert not is_true(too_long, 0.0)
    book.check_integrity()


def test_lost_forget_without_keys_is_never_due() -> None:
    world = World()
    told, empty = world.book(), world.book().digest
    told.begin(Erasure((b"k" * 32,)))
    (forget,) = told.due(10)
    told.told([forget])
    restarted = world.book()
    restarted.recall(NAMESPACE, forget.member, world.now + RETENTION_S)
    assert restarted.digest == told.digest
    for book in (told, restarted):  # Redis came back empty
        book.compare(set())
        book.check_integrity()
    assert restarted.due(10) == []
    assert restarted.digest == empty
    assert restarted.unknown([forget.member]) == [forget.member]  # applied again when it is back
    (again,) = told.due(10)
    assert again.keys == forget.keys


def test_lost_forget_has_not_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purges, "MAX_KEPT", 0)
    world = World()
    book = world.book()
    forget = book.begin(Erasure((b"k" * 32,)))
    book.told(book.due(10))
    book.compare(set())
    book.agreed(book.digest)
    assert forget.done()
    assert not is_true(forget, 0.0)
    book.check_integrity()


def test_close_ends_unpublished_purges() -> None:
    world = World()
    book = world.book()
    purge = book.begin(Erasure(tenant=TENANT))
    book.close()
    assert purge.done()
    assert not is_true(purge, 20.0)
