"""What a store has purged for good is known after a restart, and nothing more than that."""

from __future__ import annotations

import pytest

from sglang_tiered.sharing.locality.applied_purges import AppliedPurges
from sglang_tiered.sharing.locality.purges import PurgeBook
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.promises import ended, keep, promise
from sglang_tiered.storage.region.files import APPLIED_PURGES_NAME

HERE, THERE = b"h" * 32, b"t" * 32
TENANT = b"t" * 16
WEEK_S = 7 * 86400.0


class Notes:
    """A disk that may refuse."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.is_full = False
        self.num_writes = 0

    def read(self, name: str) -> bytes:
        return self.files.get(name, b"")

    def write(self, name: str, data: bytes) -> None:
        if self.is_full:
            raise OSError("No space left on device")
        self.num_writes += 1
        self.files[name] = data


class Clock:
    """Of a process, which counts from its start, and of the machine."""

    def __init__(self) -> None:
        self.wall_s = 1_800_000_000.0
        self.started_s = self.wall_s - 100.0

    def restart(self) -> None:
        self.started_s = self.wall_s

    def __call__(self) -> float:
        return self.wall_s - self.started_s


class Server:
    def __init__(self, notes: Notes, clock: Clock, namespace: bytes = HERE) -> None:
        self.book = PurgeBook(namespace, WEEK_S, clock)
        self.memory = AppliedPurges(notes, self.book, clock, lambda: clock.wall_s)
        self.memory.recall()

    def known(self, *members: bytes) -> list[bool]:
        unknown = self.book.unknown(members)
        return [member not in unknown for member in members]


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def members_of(server: Server) -> list[bytes]:
    return list(server.book.settled()[1])


def test_durable_purge_is_not_applied_again(notes: Notes, clock: Clock) -> None:
    first = Server(notes, clock)
    for _ in range(3):
        first.book.begin(Erasure(tenant=TENANT), ended(True))
    first.book.begin(Erasure())
    first.memory.remember()
    first.memory.remember()
    assert notes.num_writes == 1
    clock.restart()
    second = Server(notes, clock)
    assert second.known(*members_of(first)) == [True] * 4
    assert second.book.digest == first.book.digest
    second.memory.remember()
    assert notes.num_writes == 1
    second.book.check_integrity()


def test_undurable_purge_is_applied_again(notes: Notes, clock: Clock) -> None:
    first = Server(notes, clock)
    under_way, refused = promise(), ended(False)
    first.book.begin(Erasure(tenant=TENANT), under_way)
    first.book.begin(Erasure(tenant=TENANT), refused)
    first.memory.remember()
    assert not Server(notes, clock).book
    keep(under_way, True)
    first.memory.remember()
    assert len(Server(notes, clock).book) == 1


def test_expired_or_future_purges_are_not_recalled(notes: Notes, clock: Clock) -> None:
    first = Server(notes, clock)
    first.book.begin(Erasure(tenant=TENANT))
    first.memory.remember()
    clock.wall_s += WEEK_S - 1.0
    assert len(Server(notes, clock).book) == 1
    clock.wall_s += 2.0
    assert not Server(notes, clock).book
    clock.wall_s -= 2 * WEEK_S
    assert not Server(notes, clock).book


def test_every_namespace_has_its_own(notes: Notes, clock: Clock) -> None:
    first = Server(notes, clock)
    first.book.begin(Erasure(tenant=TENANT))
    first.memory.remember()
    first.book.change_namespace(THERE)
    first.book.begin(Erasure(tenant=TENANT))
    first.memory.remember()
    there = members_of(first)
    second = Server(notes, clock)
    assert len(second.book) == 1
    assert second.known(*there) == [False]
    second.book.change_namespace(THERE)
    assert second.known(*there) == [True]
    second.book.check_integrity()
    second.memory.remember()
    assert len(Server(notes, clock).book) == 1


@pytest.mark.parametrize("damage", range(3))
def test_a_damaged_note_is_none(notes: Notes, clock: Clock, damage: int) -> None:
    first = Server(notes, clock)
    first.book.begin(Erasure(tenant=TENANT))
    first.memory.remember()
    data = notes.files[APPLIED_PURGES_NAME]
    notes.files[APPLIED_PURGES_NAME] = [data[:-1], data[:20] + b"\xff" + data[21:], b""][damage]
    assert not Server(notes, clock).book


def test_full_disk_is_logged_once_and_retried(
    notes: Notes, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(notes, clock)
    server.book.begin(Erasure(tenant=TENANT))
    notes.is_full = True
    server.memory.remember()
    server.memory.remember()
    assert len(caplog.records) == 1
    notes.is_full = False
    server.memory.remember()
    assert len(Server(notes, clock).book) == 1
