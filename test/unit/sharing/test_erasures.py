"""The book of erasures: what is known, what another one lacks, and what survives a restart."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

import pytest

from sglang_tiered.sharing import erasures
from sglang_tiered.sharing.erasures import ErasureBook
from sglang_tiered.sharing.pages.messages import ErasureNotice
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.promises import ended, keep, promise
from sglang_tiered.storage.region.pending import Note

NAMESPACE, OTHER = bytes(32), b"x" * 32
RETENTION_S = 1000.0


class Shelf:
    """A shard's notes, and two clocks."""

    def __init__(self) -> None:
        self.now, self.wall = 100.0, 1e9
        self.noted: dict[bytes, Note] = {}
        self.num_noted = 0
        self.is_full = False

    @property
    def erased_notes(self) -> list[Note]:
        return list(self.noted.values())

    def note_erased(self, ids: Iterable[bytes], notes: Iterable[Note]) -> Future[bool]:
        assert not list(ids), "these are the store's"
        if self.is_full:
            return ended(False)
        for note in notes:
            self.noted[note.id] = note
            self.num_noted += 1
        return ended(True)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds

    def open(self, namespace: bytes = NAMESPACE) -> ErasureBook:
        clocks = {"clock": lambda: self.now, "wall_clock": lambda: self.wall}
        return ErasureBook(namespace, retention_s=RETENTION_S, notes=self, **clocks)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def test_a_message_holds_what_fits_others_the_rest(shelf: Shelf) -> None:
    one, other = shelf.open(), shelf.open()
    one.begin(Erasure.of([n.to_bytes(32, "big") for n in range(40 * 1024)]))
    rounds = 0
    while one.digest != other.digest:
        one.save()
        taught = one.compare(other.ids()[1])[1]
        assert sum(len(each.keys or b"") for each in taught) <= 384 << 10
        for each in taught:
            other.learn(each, ended(True))
        rounds += 1
        assert rounds < 10
    assert rounds == 4


@pytest.mark.parametrize("age_s", [float("inf"), float("nan"), 1e300])
def test_an_age_that_cannot_be_is_the_oldest(shelf: Shelf, age_s: float) -> None:
    book = shelf.open()
    book.learn(ErasureNotice(b"i" * 16, age_s, None, None), ended(True))
    book.settle(None)
    assert len(book) == 0


def test_purges_and_pages_have_bounds_of_their_own(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasures, "MAX_FORGETS", 5)
    monkeypatch.setattr(erasures, "MAX_PURGES", 3)
    monkeypatch.setattr(erasures, "MAX_KEYS_BYTES", 4 * 32)
    book = shelf.open()
    for number in range(10):
        book.begin(Erasure.of([bytes([number]) * 32]))
        book.begin(Erasure(tenant=bytes([number]) * 16))
    kept = [(each.tenant, each.keys) for each in book._shelf.records.values()]
    assert [tenant[0] for tenant, keys in kept if keys is None] == [7, 8, 9]
    assert [keys[0] for _, keys in kept if keys is not None] == [6, 7, 8, 9]
    book.check_integrity()


def test_done_means_durable_noted_and_everywhere(shelf: Shelf) -> None:
    book, local = shelf.open(), promise()
    done, told = book.begin(Erasure(tenant=b"a" * 16), local)
    version = book.known.version
    book.save()
    book.settle(version)
    assert not done.done(), "not durable"
    keep(local, True)
    shelf.is_full = True
    for _ in range(2):
        book.settle(version)
        assert not done.done(), "not noted"
        book.save()
    shelf.is_full = False
    book.save()
    book.settle(version - 1)
    assert not done.done(), "not everywhere"
    book.settle(version)
    assert done.result(0) is True
    assert book.num_told == len(told) == 1


@pytest.mark.parametrize("end", ["refused", "namespace", "closed"])
def test_an_erasure_that_is_not_done_says_so(shelf: Shelf, end: str) -> None:
    book, local = shelf.open(), promise()
    done, _ = book.begin(Erasure(), local)
    if end == "refused":
        keep(local, False)
        book.save()
    elif end == "namespace":
        book.change_namespace(OTHER)
    else:
        book.close()
    assert done.result(0) is False


def test_what_is_durable_is_known_after_a_restart(shelf: Shelf) -> None:
    book = shelf.open()
    book.begin(Erasure(tenant=b"a" * 16), ended(True))
    book.begin(Erasure(tenant=b"b" * 16), promise())  # which the store has not made durable
    book.save()
    book.change_namespace(OTHER)
    book.begin(Erasure.of([b"k" * 32]), ended(True))
    shelf.pass_time(1)
    book.save()
    shelf.pass_time(9)
    again = shelf.open()
    assert [each.tenant for each in again._shelf.records.values()] == [b"a" * 16]
    assert [each.age_s for each in again.compare(b"")[1]] == [10.0]
    again.change_namespace(OTHER)
    assert [each.keys for each in again._shelf.records.values()] == [b"k" * 32]
    again.check_integrity()


@pytest.mark.parametrize("damage", [b"", b"nonsense"])
def test_an_unknown_note_is_no_note(shelf: Shelf, damage: bytes) -> None:
    shelf.note_erased((), [Note(b"n" * 16, shelf.wall + 9, damage)])
    assert len(shelf.open()) == 0


def test_what_went_with_its_age_is_applied_once(shelf: Shelf) -> None:
    """Whoever still has it tells it, and pages were stored since."""
    book = shelf.open()
    _, told = book.begin(Erasure(tenant=b"a" * 16))
    for seconds, num_known in ((RETENTION_S - 1, 1), (2, 0)):
        shelf.pass_time(seconds)
        book.settle(None)
        assert len(book) == num_known
    assert book.unknown(told) == []


def test_a_clock_set_back_keeps_nothing_for_ever(shelf: Shelf) -> None:
    book = shelf.open()
    book.begin(Erasure(), ended(True))
    book.save()
    shelf.wall -= 1e6
    again = shelf.open()
    shelf.pass_time(RETENTION_S + 1)
    again.settle(None)
    assert len(again) == 0
