"""Which tombstones of a bucket are applied, across restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.runs import NAMESPACE
from kit.waiting import TIMEOUT_S, finished
from sglang_tiered.storage.base import Tombstone
from sglang_tiered.storage.promises import ended, is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.files import APPLIED_FORGETS_NAME
from sglang_tiered.storage.stack.applied_forgets import AppliedForgets

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from kit.runs import MakeRun

NOW_S = 1_000_000.0
OLD_MS, NEW_MS = 900_000_000, 1_000_060_000
KEYS = (b"k" * 32,)


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[RegionEngine]:
    engine = RegionEngine(
        tmp_path / "store", namespace=NAMESPACE, capacity_bytes=1 << 22, region_bytes=1 << 18
    )
    yield engine
    engine.close()


class Owner:
    """Forgets as it is told, or says that it did not."""

    def __init__(self, nvme: RegionEngine) -> None:
        self.nvme = nvme
        self.asked: list[tuple[bytes, ...]] = []
        self.answer = True

    def open(self) -> AppliedForgets:
        return AppliedForgets(self.nvme, self.forget, lambda: NOW_S)

    def forget(self, keys: Sequence[bytes]) -> Future[bool]:
        self.asked.append(tuple(keys))
        return ended(self.answer)


def test_each_tombstone_is_applied_once(nvme: RegionEngine) -> None:
    owner = Owner(nvme)
    for _ in range(2):
        applied = owner.open()
        for _ in range(2):
            applied.told([Tombstone("one", NEW_MS, KEYS)])
            applied.told([Tombstone("own", NEW_MS, ())])
    assert owner.asked == [KEYS]
    owner.open().told([Tombstone("own", NEW_MS, KEYS)])
    assert owner.asked == [KEYS], "this server did it"


def test_a_start_writes_its_note_once(nvme: RegionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of thousands it would rewrite all, while NVMe serves what they speak of."""
    owner, written = Owner(nvme), []
    applied = owner.open()
    monkeypatch.setattr(nvme.notes, "write", lambda *note: written.append(note))
    many = [Tombstone(str(at), NEW_MS, (bytes([at]) * 32,)) for at in range(50)]
    applied.told(many)
    assert len(written) == 1
    assert owner.asked == [tuple(key for each in many for key in each.keys)]


def test_what_did_not_last_is_applied_again(nvme: RegionEngine) -> None:
    owner = Owner(nvme)
    owner.answer = False
    owner.open().told([Tombstone("one", NEW_MS, KEYS), Tombstone("own", NEW_MS, ())])
    owner.answer = True
    owner.open().told([Tombstone("one", NEW_MS, KEYS), Tombstone("own", NEW_MS, KEYS)])
    assert owner.asked == [KEYS, KEYS]


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_new_store_skips_what_was_before(
    nvme: RegionEngine, make_run: MakeRun, is_empty: bool
) -> None:
    """It would be asked to remember every page that anybody ever forgot."""
    if not is_empty:
        finished(nvme.submit_store(make_run(1, [100])))
        assert nvme.flush(TIMEOUT_S)
    owner = Owner(nvme)
    applied = owner.open()
    applied.told([Tombstone("old", OLD_MS, KEYS)])
    applied.told([Tombstone("new", NEW_MS, KEYS)])
    assert len(owner.asked) == (1 if is_empty else 2)


@pytest.mark.parametrize("damage", [b"", b"nonsense"])
def test_a_damaged_note_forgets_again(nvme: RegionEngine, damage: bytes) -> None:
    owner = Owner(nvme)
    owner.open().told([Tombstone("one", NEW_MS, KEYS)])
    nvme.notes.write(APPLIED_FORGETS_NAME, damage)
    owner.open().told([Tombstone("one", NEW_MS, KEYS)])
    assert owner.asked == [KEYS, KEYS]
    assert is_true(nvme.forget(KEYS), TIMEOUT_S)
