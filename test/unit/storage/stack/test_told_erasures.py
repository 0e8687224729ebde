"""What other servers erased: applied once, by pieces, across restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.runs import NAMESPACE
from kit.waiting import TIMEOUT_S, eventually
from sglang_tiered.storage.base import PIECE_KEYS, Erasure
from sglang_tiered.storage.bucket import BucketEngine, BucketSettings
from sglang_tiered.storage.promises import all_true, ended, is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.stack import TierStack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from pathlib import Path


TENANT = b"t" * 16
MANY = tuple(number.to_bytes(32, "big") for number in range(2 * PIECE_KEYS + 1))


@pytest.fixture
def open_nvme(tmp_path: Path) -> Iterator[Callable[[], RegionEngine]]:
    opened: list[RegionEngine] = []

    def open_nvme() -> RegionEngine:
        for engine in opened:
            engine.close()
        opened.append(
            RegionEngine(
                tmp_path / "store",
                namespace=NAMESPACE,
                capacity_bytes=1 << 22,
                region_bytes=1 << 18,
            )
        )
        return opened[-1]

    yield open_nvme
    opened[-1].close()


def test_no_piece_has_the_id_of_the_whole() -> None:
    what = Erasure(MANY)
    pieces = what.pieces
    assert [len(each.keys or ()) for each in pieces] == [PIECE_KEYS, PIECE_KEYS, 1]
    assert len({what.id, *(each.id for each in pieces)}) == 4
    assert [each.id for each in pieces] == [each.id for each in Erasure(MANY, None, what.id).pieces]
    few = Erasure(MANY[:PIECE_KEYS])
    assert [each.id for each in few.pieces] == [few.id]


@pytest.mark.parametrize("what", [Erasure(MANY[:1]), Erasure(None, TENANT), Erasure(MANY)])
def test_each_is_applied_once(open_nvme: Callable[[], RegionEngine], what: Erasure) -> None:
    nvme, asked = open_nvme(), list[Erasure]()

    def erase(each: Erasure) -> Future[bool]:
        asked.append(each)
        return nvme.erase(each)

    for _ in range(2):
        for _ in range(2):
            assert is_true(nvme.erase_told(what, erase), TIMEOUT_S)
        nvme = open_nvme()
    assert [each.id for each in asked] == [what.id]


def test_only_the_pieces_not_known_are_erased(open_nvme: Callable[[], RegionEngine]) -> None:
    nvme, asked, what = open_nvme(), list[Erasure](), Erasure(MANY)
    assert is_true(nvme.erase(what.pieces[1]), TIMEOUT_S)

    def erase(each: Erasure) -> Future[bool]:
        asked.append(each)
        return nvme.erase(each)

    assert is_true(nvme.erase_told(what, erase), TIMEOUT_S)
    assert [each.id for each in asked] == [what.pieces[0].id, what.pieces[2].id]


def test_what_did_not_last_is_applied_again(open_nvme: Callable[[], RegionEngine]) -> None:
    nvme, asked, what = open_nvme(), list[Erasure](), Erasure(None, TENANT)

    def erase(each: Erasure) -> Future[bool]:
        asked.append(each)
        return ended(False)

    for _ in range(2):
        assert not is_true(nvme.erase_told(what, erase), TIMEOUT_S)
    assert len(asked) == 2


def test_a_start_writes_its_notes_together(open_nvme: Callable[[], RegionEngine]) -> None:
    """For each of thousands it would wait, while NVMe serves what they speak of."""
    nvme = open_nvme()
    before = nvme.stats().bytes_written
    many = [Erasure((key,)) for key in MANY[:50]]
    assert is_true(all_true([nvme.erase_told(each, nvme.erase) for each in many]), TIMEOUT_S)
    assert nvme.stats().bytes_written - before <= 5 * 4096


def test_memory_hears_what_the_bucket_knew_before(tmp_path: Path) -> None:
    """As when tiers are attached to a running server, and another one has purged meanwhile."""
    settings = BucketSettings(url=(tmp_path / "bucket").as_uri())
    other = BucketEngine(settings, namespace=NAMESPACE)
    assert is_true(other.erase(Erasure(None, TENANT)), TIMEOUT_S)
    other.close()
    nvme = RegionEngine(
        tmp_path / "nvme", namespace=NAMESPACE, capacity_bytes=1 << 22, region_bytes=1 << 18
    )
    bucket = BucketEngine(settings, namespace=NAMESPACE)
    assert bucket.refresh(TIMEOUT_S)
    heard: list[bytes | None] = []

    def erase(what: Erasure) -> Future[bool]:
        heard.append(what.tenant)
        return ended(True)

    stack = TierStack(nvme, [bucket], on_told=erase)
    eventually(lambda: heard == [TENANT], "memory did not hear of it")
    stack.close()
