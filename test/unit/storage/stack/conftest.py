"""An engine over a directory and shared tiers, closed and checked when the test is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from shared_tier import SharedTier

from kit.tiers import open_region
from kit.waiting import TIMEOUT_S, drained, eventually
from sglang_tiered.storage.base import REMOTE_TIERS, Job, Reason, Run, Tier
from sglang_tiered.storage.stack import TierStack
from sglang_tiered.storage.stack.demotion import StackSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SETTINGS = StackSettings(
    staging_bytes=1 << 20, batch_bytes=1 << 16, promotion_bytes=1 << 20, retry_s=0.01
)


class Forgetful(SharedTier):
    """Says that it holds more than it can serve: as another server whose page just went, or one
    whose bytes arrive damaged. Or it has a bug, and raises where others end a job or a future."""

    def __init__(self, tier: Tier = Tier.OBJECT) -> None:
        super().__init__(tier=tier)
        self.failing: dict[bytes, Reason] = {}
        self.asked: list[tuple[bytes, ...]] = []
        self.is_raising = False

    def submit_load(self, run: Run, *, deadline_s: float | None = None) -> Job:
        if self.is_raising:
            raise RuntimeError("a bug")
        self.asked.append(run.keys)
        job = super().submit_load(run, deadline_s=deadline_s)
        if job.done:
            pages = zip(run.keys, job.reasons, strict=True)
            job.reasons = [self.failing.get(key, reason) for key, reason in pages]
        return job

    def erase(self, what: Any, **how: Any) -> Any:
        if self.is_raising:
            raise RuntimeError("a bug")
        return super().erase(what, **how)


class Tiers:
    """An engine over a directory and shared tiers, which can be opened again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.peers, self.bucket = Forgetful(Tier.PEER), Forgetful()
        self.order: tuple[Tier, ...] = REMOTE_TIERS
        self.made: list[TierStack] = []

    def open(
        self, settings: Any = SETTINGS, *, peers: bool = False, bucket: bool = True, **more: Any
    ) -> TierStack:
        remote = [self.peers] * peers + [self.bucket] * bucket
        engine = TierStack(
            open_region(self.directory), remote, settings, order=lambda: self.order, **more
        )
        self.made.append(engine)
        return engine

    def until(self, what: str = "", **figures: int) -> None:
        """The figures of the engine become these."""
        stats = self.made[-1].stack_stats
        eventually(
            lambda: all(getattr(stats(), name) == wanted for name, wanted in figures.items()),
            f"{what or figures}",
        )


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(tmp_path / "store")
    yield made
    for tier in (made.peers, made.bucket):
        tier.is_raising = False
        tier.release()
    for engine in made.made:
        drained(engine, TIMEOUT_S)
        engine.check_integrity()
        engine.close()


@pytest.fixture
def engine(tiers: Tiers) -> TierStack:
    return tiers.open()


@pytest.fixture
def still(tiers: Tiers) -> TierStack:
    """Nothing is copied down, for the bucket was not listed yet."""
    tiers.bucket.known = False
    return tiers.open()


@pytest.fixture
def three(tiers: Tiers) -> TierStack:
    """Over peers too; nothing is copied down."""
    tiers.bucket.known = False
    return tiers.open(peers=True)
