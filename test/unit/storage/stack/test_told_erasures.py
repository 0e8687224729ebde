"""What other servers erased: applied once, by pieces, across restarts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from kit.runs import NAMESPACE
from kit.tiers import open_region
from kit.waiting import TIMEOUT_S, eventually
from sglang_tiered.object_config import ObjectConfig
from sglang_tiered.storage.base import PIECE_KEYS, Erasure
from sglang_tiered.storage.bucket import BucketEngine
from sglang_tiered.storage.promises import ended, is_true
from sglang_tiered.storage.stack import TierStack

TENANT = b"t" * 16
MANY = tuple(number.to_bytes(32, "big") for number in range(2 * PIECE_KEYS + 1))


class Store:
    """A store that opens anew, and what it is asked to erase."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.nvme = open_region(directory)
        self.asked: list[Erasure] = []
        self.answer: Future[bool] | None = None

    def reopen(self) -> None:
        self.nvme.close()
        self.nvme = open_region(self.directory)

    def told(self, what: Erasure) -> bool:
        return is_true(self.nvme.erase_told(what, self._erase), TIMEOUT_S)

    def _erase(self, what: Erasure) -> Future[bool]:
        self.asked.append(what)
        return self.answer or self.nvme.erase(what)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "store")
    yield made
    made.nvme.close()


def test_no_piece_has_the_id_of_the_whole() -> None:
    what = Erasure(MANY)
    pieces = what.pieces
    assert [len(each.keys or ()) for each in pieces] == [PIECE_KEYS, PIECE_KEYS, 1]
    assert len({what.id, *(each.id for each in pieces)}) == 4
    assert [each.id for each in pieces] == [each.id for each in Erasure(MANY, None, what.id).pieces]
    few = Erasure(MANY[:PIECE_KEYS])
    assert [each.id for each in few.pieces] == [few.id]


@pytest.mark.parametrize("what", [Erasure(MANY[:1]), Erasure(None, TENANT), Erasure(MANY)])
def test_each_is_applied_once(store: Store, what: Erasure) -> None:
    for _ in range(2):
        for _ in range(2):
            assert store.told(what)
        store.reopen()
    assert [each.id for each in store.asked] == [what.id]


def test_only_the_pieces_not_known_are_erased(store: Store) -> None:
    what = Erasure(MANY)
    assert is_true(store.nvme.erase(what.pieces[1]), TIMEOUT_S)
    assert store.told(what)
    assert [each.id for each in store.asked] == [what.pieces[0].id, what.pieces[2].id]


def test_what_did_not_last_is_applied_again(store: Store) -> None:
    store.answer, what = ended(False), Erasure(None, TENANT)
    assert not store.told(what) and not store.told(what)
    assert len(store.asked) == 2


def test_memory_hears_what_the_bucket_knew_before(tmp_path: Path) -> None:
    """As when tiers are attached to a running server, and another one has purged meanwhile."""
    settings = ObjectConfig(url=(tmp_path / "bucket").as_uri())
    other = BucketEngine(settings, namespace=NAMESPACE)
    assert is_true(other.erase(Erasure(None, TENANT)), TIMEOUT_S)
    other.close()
    bucket = BucketEngine(settings, namespace=NAMESPACE)
    assert bucket.refresh(TIMEOUT_S)
    heard: list[Any] = []
    stack = TierStack(
        open_region(tmp_path / "nvme"),
        [bucket],
        on_told=lambda what: heard.append(what.tenant) or ended(True),  # type: ignore[func-returns-value]
    )
    eventually(lambda: heard == [TENANT], "memory did not hear of it")
    stack.close()
