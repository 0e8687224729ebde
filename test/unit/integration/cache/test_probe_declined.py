"""The tier that a plan stopped short of is measured, with pages that were declined."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_tiered.integration.cache.load_scheduler import LoadScheduler
from sglang_tiered.storage.base import Tier
from sglang_tiered.storage.stack.tiers import Span

HASHES = [f"{number:064x}" for number in range(10)]
SPANS = [Span(Tier.NVME, 6), Span(Tier.OBJECT, 4)]


@pytest.mark.parametrize(
    ("num_planned", "probed"),
    [
        (10, None),
        (6, (HASHES[6:], Tier.OBJECT)),
        (8, (HASHES[8:], Tier.OBJECT)),
        (2, (HASHES[2:6], Tier.NVME)),
        (0, (HASHES[:6], Tier.NVME)),
    ],
)
def test_declined_tier_is_probed_with_declined_pages(
    num_planned: int, probed: tuple[list[str], Tier] | None
) -> None:
    calls: list[Any] = []
    transfers = SimpleNamespace(probe_tier=lambda hashes, tier: calls.append((hashes, tier)))
    loads: Any = SimpleNamespace(planner=SimpleNamespace(wants_probe=lambda tier: True))
    storage: Any = SimpleNamespace(transfers=transfers)
    LoadScheduler._probe_declined(loads, storage, HASHES, SPANS, num_planned)
    assert calls == ([] if probed is None else [probed])


def test_tier_just_measured_is_left_alone() -> None:
    calls: list[Any] = []
    loads: Any = SimpleNamespace(planner=SimpleNamespace(wants_probe=lambda tier: False))
    transfers = SimpleNamespace(probe_tier=lambda hashes, tier: calls.append((hashes, tier)))
    storage: Any = SimpleNamespace(transfers=transfers)
    LoadScheduler._probe_declined(loads, storage, HASHES, SPANS, 0)
    assert calls == []
