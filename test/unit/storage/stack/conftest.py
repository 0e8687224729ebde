"""An engine over a directory and a shared tier, closed and checked when the test is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from shared_tier import SharedTier

from kit.waiting import TIMEOUT_S, drained
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.stack import TierStack
from sglang_tiered.storage.stack.tiers import StackSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SETTINGS = StackSettings(
    staging_bytes=1 << 20, batch_bytes=1 << 16, promotion_bytes=1 << 20, retry_s=0.01
)


class Tiers:
    """An engine over a directory and a shared tier, which can be opened again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bucket = SharedTier()
        self.made: list[TierStack] = []

    def open(self, settings: StackSettings = SETTINGS, *, may_promote: bool = True) -> TierStack:
        nvme = RegionEngine(
            self.directory,
            namespace=b"\x11" * 32,
            capacity_bytes=1 << 22,
            region_bytes=1 << 18,
            num_threads=2,
        )
        engine = TierStack(nvme, [self.bucket], settings, may_promote=lambda: may_promote)
        self.made.append(engine)
        return engine


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(tmp_path / "store")
    yield made
    made.bucket.release()
    for engine in made.made:
        drained(engine, TIMEOUT_S)
        engine.check_integrity()
        engine.close()


@pytest.fixture
def engine(tiers: Tiers) -> TierStack:
    return tiers.open()
