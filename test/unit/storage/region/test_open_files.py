"""A store is refused for the files it would hold open before it holds them, or may hold them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from kit.tiers import open_region
from sglang_tiered.errors import StoreError
from sglang_tiered.storage.region import RegionEngine, directory
from sglang_tiered.storage.region.format import region_name

REGION = 64 * 1024


def limited(patch: pytest.MonkeyPatch, soft: int, hard: int) -> list[tuple[int, int]]:
    """A process with ten files open: its limits, the last of which count."""
    limits = [(soft, hard)]
    patch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    patch.setattr(resource, "setrlimit", lambda kind, now: limits.append(now))
    patch.setattr(directory, "_num_open", lambda: 10)
    return limits


def open_engine(directory: Path, num_regions: int) -> RegionEngine:
    return open_region(directory, capacity_bytes=num_regions * REGION, region_bytes=REGION)


def test_a_cap_beyond_the_hard_limit_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 1024, 4096)
    with pytest.raises(StoreError, match=r"hold 4000 region files.*ulimit -Hn.* 4096.*raise it"):
        open_engine(tmp_path, 4000)
    open_engine(tmp_path, 3000).close()  # whose lock is free


@pytest.mark.parametrize(
    ("num_held", "capacity", "soft"),
    [
        (0, 500, 1024),  # it rises only to the need
        (0, 2000, 2000 + 10 + 512),
        (600, 1000, 600 + 700 + 10 + 512),  # of an earlier run, half the size of those to come
    ],
)
def test_the_soft_limit_rises_to_the_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_held: int, capacity: int, soft: int
) -> None:
    limits = limited(monkeypatch, 1024, 4096)
    for sequence in range(num_held):
        with open(tmp_path / region_name(sequence), "wb") as file:
            file.truncate(REGION // 2)
    directory.allow_regions(tmp_path, capacity * REGION, REGION)
    assert limits[-1] == (soft, 4096)


def test_no_limit_at_all_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    directory.allow_regions(tmp_path, 1 << 40, REGION)
    assert directory.max_regions() > 1 << 30
