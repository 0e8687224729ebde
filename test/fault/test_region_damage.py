"""Files that were damaged, cut, deleted, planted or left by a killed process."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kit.runs import blank, make_run
from kit.stores import flip
from kit.tiers import open_region
from kit.waiting import finished
from sglang_tiered.errors import StoreFormatError
from sglang_tiered.storage.base import Health, Reason, Run
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region import format as region_format
from sglang_tiered.storage.region.format import BLOCK_BYTES, RegionHeader, pack_region_header

REGION = 64 * 1024


def open_engine(directory: Path) -> RegionEngine:
    return open_region(directory, capacity_bytes=8 * REGION, region_bytes=REGION)


def region_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("region-*.kv"))


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "LOCK"}


def loaded(engine: RegionEngine, run: Run) -> list[bool]:
    """Which pages come back; asserts that those are right."""
    target = blank(run)
    reasons = finished(engine.submit_load(target))
    for expected, page, reason in zip(run.pages, target.pages, reasons, strict=True):
        assert reason in (Reason.OK, Reason.MISS, Reason.CORRUPT, Reason.IO_ERROR)
        if reason is Reason.OK:
            assert b"".join(page) == b"".join(expected), "wrong bytes were served"
    return [reason is Reason.OK for reason in reasons]


@pytest.fixture
def runs() -> list[Run]:
    return [make_run(seed, [4096, 3000]) for seed in range(4)]


@pytest.fixture
def sealed(tmp_path: Path, runs: list[Run]) -> Path:
    """A closed store: one sealed region with four extents of two pages."""
    engine = open_engine(tmp_path / "sealed")
    for run in runs:
        assert finished(engine.submit_store(run)) == [Reason.OK] * 2
    engine.close()
    assert len(region_files(tmp_path / "sealed")) == 1
    return tmp_path / "sealed"


@pytest.fixture
def unsealed(tmp_path: Path, runs: list[Run]) -> Path:
    """The same as a killed process leaves it: no footer."""
    engine = open_engine(tmp_path / "live")
    for run in runs:
        finished(engine.submit_store(run))
    shutil.copytree(tmp_path / "live", tmp_path / "unsealed")
    engine.close()
    return tmp_path / "unsealed"


def pages_after(directory: Path, runs: list[Run]) -> list[list[bool]]:
    engine = open_engine(directory)
    result = [loaded(engine, run) for run in runs]
    engine.check_integrity()
    engine.close()
    return result


ALL = [[True, True]] * 4
NONE = [[False, False]] * 4
EXTENT = 3 * BLOCK_BYTES  # header, 4096 bytes, 3000 bytes padded
SECOND = BLOCK_BYTES + EXTENT
FIRST_ONLY = ALL[:1] + NONE[1:]
COSTS = {  # of a bit that flips there: in a region with a footer, and in one without
    **dict.fromkeys([0, 9, 40, 56, 2000, BLOCK_BYTES - 1], (NONE, NONE)),  # its header
    **dict.fromkeys([SECOND + 60, SECOND + 3000], (ALL, FIRST_ONLY)),  # an extent's, its padding
    SECOND + BLOCK_BYTES + 5: ([ALL[0], [False, True], *ALL[2:]],) * 2,  # a page
    SECOND + 2 * EXTENT + BLOCK_BYTES + 5: ([*ALL[:3], [False, True]], [*ALL[:3], NONE[0]]),
    **dict.fromkeys([REGION - 1, REGION - BLOCK_BYTES - 1], (ALL, ALL)),  # trailer, footer
}


@pytest.mark.parametrize("position", COSTS)
def test_a_flipped_bit_costs_what_it_must(
    sealed: Path, unsealed: Path, runs: list[Run], position: int
) -> None:
    for directory, cost in zip((sealed, unsealed), COSTS[position], strict=True):
        flip(region_files(directory)[0], position)
        assert pages_after(directory, runs) == cost
        assert pages_after(directory, runs) == cost, "the second start finds others"
        assert bool(region_files(directory)) == (cost != NONE), "useless, and still there"


def test_a_start_finds_no_damaged_page(unsealed: Path, runs: list[Run]) -> None:
    """Or it would hide an older copy, and be a duplicate where it is stored again."""
    flip(region_files(unsealed)[0], SECOND + BLOCK_BYTES + 5)
    for _ in range(2):
        engine = open_engine(unsealed)
        assert engine.contains(runs[1].keys) == [False, True]
        engine.close()
    engine = open_engine(unsealed)
    assert finished(engine.submit_store(runs[1])) == [Reason.OK, Reason.DUPLICATE]
    engine.close()


@pytest.mark.parametrize("harm", ["delete", "truncate"])
def test_files_harmed_while_running(tmp_path: Path, harm: str) -> None:
    runs, after = [make_run(seed, [12_288] * 3) for seed in range(3)], make_run(50, [4096])
    engine = open_engine(tmp_path / "s")
    for run in runs:
        finished(engine.submit_store(run))
    for file in region_files(tmp_path / "s"):
        os.truncate(file, 0) if harm == "truncate" else file.unlink()
    for run in runs:
        loaded(engine, run)
    assert finished(engine.submit_store(after)) == [Reason.OK]
    assert engine.stats().health is Health.RUNNING
    engine.close()
    assert pages_after(tmp_path / "s", [after]) == [[True]], "acknowledged, then lost"


def test_newer_format_is_refused_and_no_byte_changes(
    sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = sealed / region_format.region_name(0)
    flip(damaged, 100)  # would be removed if the newer one below were not seen first
    monkeypatch.setattr(region_format, "FORMAT_VERSION", 4)
    newer = pack_region_header(RegionHeader(REGION, 9, b"n" * 16, 1))
    monkeypatch.undo()
    (sealed / region_format.region_name(9)).write_bytes(newer + bytes(REGION - len(newer)))
    before = contents(sealed)
    with pytest.raises(StoreFormatError, match="written in format 4, newer than 3"):
        open_engine(sealed)
    assert contents(sealed) == before


def test_what_is_no_file_of_ours_is_left(sealed: Path, runs: list[Run]) -> None:
    """No FIFO that is named like a region hangs anybody, and no link is followed."""
    names = ("notes.txt", "region-7.kv", "WARM")  # the last one of an earlier commit
    for name in names:
        (sealed / name).write_text(name)
    (sealed / "region-00000000000000ff.kv").mkdir()
    fifos = [sealed / "region-0000000000000009.kv", sealed / "CHECKPOINT"]
    for each in fifos:
        os.mkfifo(each)
    writers = [os.open(each, os.O_RDWR) for each in fifos]
    try:
        assert pages_after(sealed, runs) == ALL
    finally:
        for writer in writers:
            os.close(writer)
    assert [(sealed / name).read_text() for name in names] == [*names]
    assert not fifos[1].exists(), "an earlier program's file takes room for ever"
    file, elsewhere = sealed / region_format.region_name(0), sealed.parent / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    assert pages_after(sealed, runs) == NONE
    assert elsewhere.read_bytes() == before
