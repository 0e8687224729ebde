"""Which erasures of a bucket are applied, across restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.runs import NAMESPACE
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.promises import ended
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.stack.tier_stack import AppliedErasures

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path


KEYS, TENANT = (b"k" * 32,), b"t" * 16


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[RegionEngine]:
    engine = RegionEngine(
        tmp_path / "store", namespace=NAMESPACE, capacity_bytes=1 << 22, region_bytes=1 << 18
    )
    yield engine
    engine.close()


class Owner:
    """Erases as it is told, or says that it did not."""

    def __init__(self, nvme: RegionEngine) -> None:
        self.nvme = nvme
        self.asked: list[tuple[bytes, ...] | bytes | None] = []
        self.answer = True

    def open(self) -> AppliedErasures:
        return AppliedErasures(self.nvme, self.erase)

    def erase(self, what: Erasure) -> Future[bool]:
        assert not what.spread
        self.asked.append(what.tenant if what.keys is None else what.keys)
        return ended(self.answer)


def test_each_tombstone_is_applied_once(nvme: RegionEngine) -> None:
    owner = Owner(nvme)
    for _ in range(2):
        applied = owner.open()
        for _ in range(2):
            applied.told([Erasure(id=b"one", keys=KEYS)])
            applied.told([Erasure(id=b"own", keys=())])
    assert owner.asked == [KEYS]
    owner.open().told([Erasure(id=b"own", keys=KEYS)])
    assert owner.asked == [KEYS], "this server did it"


def test_a_start_writes_its_note_once(nvme: RegionEngine) -> None:
    """For each of thousands it would wait, while NVMe serves what they speak of."""
    owner, before = Owner(nvme), nvme.stats().bytes_written
    many = [Erasure((bytes([at]) * 32,)) for at in range(50)]
    owner.open().told(many)
    assert nvme.stats().bytes_written - before <= 3 * 4096
    assert owner.asked == [tuple(key for each in many for key in each.keys or ())]


def test_what_did_not_last_is_applied_again(nvme: RegionEngine) -> None:
    owner = Owner(nvme)
    owner.answer = False
    owner.open().told([Erasure(id=b"one", keys=KEYS), Erasure(id=b"own", keys=())])
    owner.answer = True
    owner.open().told([Erasure(id=b"one", keys=KEYS), Erasure(id=b"own", keys=KEYS)])
    assert owner.asked == [KEYS, KEYS]


def test_a_tenant_told_twice_is_erased_once(nvme: RegionEngine) -> None:
    owner = Owner(nvme)
    twice = [Erasure(None, TENANT, b"one"), Erasure(None, TENANT, b"two")]
    owner.open().told(twice)
    owner.open().told(twice)
    assert owner.asked == [TENANT]
