"""A store is refused for the files it would hold open before it holds them, or may hold them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from sglang_tiered.errors import StoreError
from sglang_tiered.storage.region import RegionEngine, directory
from sglang_tiered.storage.region.format import region_name

REGION = 64 * 1024


class Limits:
    """Of a process with ten files open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
        self.now = (soft, hard)
        monkeypatch.setattr(resource, "getrlimit", lambda kind: self.now)
        monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: self.set(limits))
        monkeypatch.setattr(directory, "_num_open", lambda: 10)

    def set(self, limits: tuple[int, int]) -> None:
        self.now = limits


def open_engine(directory: Path, num_regions: int) -> RegionEngine:
    return RegionEngine(
        directory,
        namespace=b"\x11" * 32,
        capacity_bytes=num_regions * REGION,
        region_bytes=REGION,
        num_threads=2,
    )


def test_a_cap_beyond_the_hard_limit_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Limits(monkeypatch, 1024, 4096)
    with pytest.raises(StoreError, match=r"hold 4000 region files.*ulimit -Hn.* 4096.*raise it"):
        open_engine(tmp_path, 4000)
    open_engine(tmp_path, 3000).close()  # whose lock is free


def test_the_soft_limit_rises_only_to_the_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(monkeypatch, 1024, 4096)
    open_engine(tmp_path, 500).close()
    assert limits.now == (1024, 4096)
    open_engine(tmp_path, 2000).close()
    assert limits.now == (2000 + 10 + 512, 4096)


def test_files_of_an_earlier_run_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(monkeypatch, 1024, 4096)
    for sequence in range(600):  # half the size of those to come
        with open(tmp_path / region_name(sequence), "wb") as file:
            file.truncate(REGION // 2)
    directory.allow_regions(tmp_path, 1000 * REGION, REGION)
    assert limits.now[0] == 600 + 700 + 10 + 512


def test_no_limit_at_all_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Limits(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    directory.allow_regions(tmp_path, 1 << 40, REGION)
    assert directory.max_regions() > 1 << 30
