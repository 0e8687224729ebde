"""The fingerprints of what a region store holds: all of it, and told anew when it changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sglang_tiered.storage.base import Erasure, Run
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine, view

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.runs import MakeRun


REGION = 64 * 1024
NAMESPACE, OTHER = b"\x11" * 32, b"\x22" * 32
TENANT = b"t" * 16


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RegionEngine]:
    monkeypatch.setattr(view, "_ROWS_AT_ONCE", 3)
    engine = RegionEngine(
        tmp_path / "shard", namespace=NAMESPACE, capacity_bytes=4 * REGION, region_bytes=REGION
    )
    yield engine
    engine.close()


def first_words(*runs: Run) -> list[int]:
    return sorted(int.from_bytes(key[:8], "little") for run in runs for key in run.keys)


def store(engine: RegionEngine, run: Run) -> None:
    assert engine.submit_store(run).wait(20.0)


def test_fingerprints_cover_all_pages_once_a_version(
    engine: RegionEngine, make_run: MakeRun
) -> None:
    told = engine.view.fingerprints(0)
    assert told is not None
    assert told[0] > 0
    assert len(told[1]) == 0
    one, two = make_run(1, [100] * 7), make_run(2, [100] * 4)
    versions = [told[0]]
    for runs in ([one], [one, two]):
        store(engine, runs[-1])
        told = engine.view.fingerprints(versions[-1])
        assert told is not None
        assert sorted(told[1].tolist()) == first_words(*runs)
        assert told[0] not in versions
        versions.append(told[0])
        assert engine.view.fingerprints(told[0]) is None
    assert engine.view.fingerprints(0) is not None
    store(engine, two)  # held already
    assert engine.view.fingerprints(versions[-1]) is None


def test_what_is_gone_is_told(engine: RegionEngine, make_run: MakeRun) -> None:
    one = make_run(1, [100] * 5)
    run = make_run(2, [100] * 4)
    two = Run(run.keys, run.pages, TENANT)
    store(engine, one)
    store(engine, two)
    version, _ = engine.view.fingerprints(0) or (0, None)
    is_true(engine.erase(Erasure(tenant=TENANT)), 20.0)
    told = engine.view.fingerprints(version)
    assert told is not None
    assert sorted(told[1].tolist()) == first_words(one)
    engine.set_namespace(OTHER)
    told = engine.view.fingerprints(told[0])
    assert told is not None
    assert len(told[1]) == 0


def test_what_reclaim_takes_is_told(engine: RegionEngine, make_run: MakeRun) -> None:
    version = 0
    for seed in range(12):
        store(engine, make_run(seed, [4096] * 10))
        told = engine.view.fingerprints(version)
        assert told is not None
        version = told[0]
        assert len(set(told[1].tolist())) == len(told[1]) == engine.stats().num_pages
    assert engine.stats().num_pages_evicted > 0
