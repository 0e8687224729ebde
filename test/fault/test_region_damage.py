"""Files that were damaged, cut, deleted, planted or left by a killed process."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from kit.runs import NAMESPACE, OTHER_NAMESPACE, Blank, MakeRun, PageData
from kit.waiting import finished
from sglang_tiered.errors import StoreError, StoreFormatError, StoreLockedError
from sglang_tiered.storage.base import Health, Reason, Run, Stop
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region import format as region_format
from sglang_tiered.storage.region.format import BLOCK_BYTES, RegionHeader, pack_region_header

if TYPE_CHECKING:
    from pathlib import Path


REGION = 64 * 1024


def open_engine(directory: Path, namespace: bytes = NAMESPACE, regions: int = 8) -> RegionEngine:
    return RegionEngine(
        directory,
        namespace=namespace,
        capacity_bytes=regions * REGION,
        region_bytes=REGION,
        num_readers=2,
    )


def region_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("region-*.kv"))


def digest(directory: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()
    }


def loaded(engine: RegionEngine, run: Run, blank: Blank) -> list[bool]:
    """Which pages come back; asserts that those are right."""
    target = blank(run)
    reasons = finished(engine.submit_load(target))
    for expected, page, reason in zip(run.pages, target.pages, reasons, strict=True):
        assert reason in (Reason.OK, Reason.MISS, Reason.CORRUPT, Reason.IO_ERROR)
        if reason is Reason.OK:
            assert b"".join(page) == b"".join(expected), "wrong bytes were served"
    return [reason is Reason.OK for reason in reasons]


@pytest.fixture
def runs(make_run: MakeRun) -> list[Run]:
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


def flip(file: Path, position: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(position)
        (byte,) = stream.read(1)
        stream.seek(position)
        stream.write(bytes([byte ^ 0x10]))


def pages_after(directory: Path, runs: list[Run], blank: Blank) -> list[list[bool]]:
    engine = open_engine(directory)
    result = [loaded(engine, run, blank) for run in runs]
    engine.check_integrity()
    engine.close()
    return result


ALL = [[True, True]] * 4
NONE = [[False, False]] * 4
EXTENT = 3 * BLOCK_BYTES  # header, 4096 bytes, 3000 bytes padded


def test_clean_restart_finds_everything(sealed: Path, runs: list[Run], blank: Blank) -> None:
    assert pages_after(sealed, runs, blank) == ALL


def test_restart_after_kill_finds_everything_twice(
    unsealed: Path, runs: list[Run], blank: Blank
) -> None:
    assert pages_after(unsealed, runs, blank) == ALL
    assert pages_after(unsealed, runs, blank) == ALL


@pytest.mark.parametrize("position", [0, 9, 40, 56, 2000, 4095])
def test_flip_in_region_header_loses_the_region_only(
    sealed: Path, runs: list[Run], blank: Blank, position: int
) -> None:
    flip(region_files(sealed)[0], position)
    assert pages_after(sealed, runs, blank) == NONE
    assert region_files(sealed) == [], "the file cannot be used and must not stay"


@pytest.mark.parametrize("where", ["header", "padding of header", "payload"])
def test_flip_in_second_extent_keeps_the_first(
    unsealed: Path, runs: list[Run], blank: Blank, where: str
) -> None:
    start = BLOCK_BYTES + EXTENT
    offset = {"header": 60, "padding of header": 3000, "payload": BLOCK_BYTES + 5}[where]
    flip(region_files(unsealed)[0], start + offset)
    assert pages_after(unsealed, runs, blank) == [[True, True]] + [[False, False]] * 3


def test_flip_in_sealed_extent_header_costs_nothing(
    sealed: Path, runs: list[Run], blank: Blank
) -> None:
    flip(region_files(sealed)[0], BLOCK_BYTES + EXTENT + 60)
    assert pages_after(sealed, runs, blank) == ALL


def test_flip_in_sealed_payload_costs_one_page(sealed: Path, runs: list[Run], blank: Blank) -> None:
    flip(region_files(sealed)[0], BLOCK_BYTES + EXTENT + BLOCK_BYTES + 5)
    assert pages_after(sealed, runs, blank) == [
        [True, True],
        [False, True],
        [True, True],
        [True, True],
    ]


@pytest.mark.parametrize("from_end", [1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES])
def test_flip_in_footer_falls_back_to_walking(
    sealed: Path, runs: list[Run], blank: Blank, from_end: int
) -> None:
    flip(region_files(sealed)[0], REGION - from_end)
    assert pages_after(sealed, runs, blank) == ALL


@pytest.mark.parametrize("kind", ["sealed", "unsealed"])
def test_truncation_at_every_block(
    tmp_path: Path, runs: list[Run], blank: Blank, kind: str, request: pytest.FixtureRequest
) -> None:
    source: Path = request.getfixturevalue(kind)
    for num_blocks in range(REGION // BLOCK_BYTES):
        directory = tmp_path / f"cut-{num_blocks}"
        shutil.copytree(source, directory)
        os.truncate(region_files(directory)[0], num_blocks * BLOCK_BYTES)
        whole = min(max(num_blocks - 1, 0) * BLOCK_BYTES // EXTENT, 4)
        assert pages_after(directory, runs, blank) == ALL[:whole] + NONE[whole:]


def test_truncation_inside_a_block(sealed: Path, runs: list[Run], blank: Blank) -> None:
    os.truncate(region_files(sealed)[0], BLOCK_BYTES + EXTENT + 777)
    assert pages_after(sealed, runs, blank) == ALL[:1] + NONE[1:]


def test_swapped_files_are_not_taken_for_each_other(
    tmp_path: Path, make_run: MakeRun, blank: Blank
) -> None:
    runs = [make_run(seed, [12_288] * 3) for seed in range(2)]
    engine = open_engine(tmp_path / "s")
    for run in runs:
        finished(engine.submit_store(run))
    engine.close()
    first, second = region_files(tmp_path / "s")
    first.rename(tmp_path / "swap")
    second.rename(first)
    (tmp_path / "swap").rename(second)
    engine = open_engine(tmp_path / "s")
    assert [loaded(engine, run, blank) for run in runs] == [[False] * 3] * 2
    engine.close()


def test_each_file_deleted_while_closed(tmp_path: Path, make_run: MakeRun, blank: Blank) -> None:
    runs = [make_run(seed, [12_288] * 3) for seed in range(4)]
    engine = open_engine(tmp_path / "s")
    for run in runs:
        finished(engine.submit_store(run))
    engine.close()
    for lost in range(4):
        directory = tmp_path / f"without-{lost}"
        shutil.copytree(tmp_path / "s", directory)
        region_files(directory)[lost].unlink()
        engine = open_engine(directory)
        found = [loaded(engine, run, blank) == [True] * 3 for run in runs]
        assert found == [i != lost for i in range(4)]
        assert finished(engine.submit_store(runs[lost])) == [Reason.OK] * 3
        engine.check_integrity()
        engine.close()


@pytest.mark.parametrize("harm", ["delete", "truncate", "remove directory"])
def test_files_harmed_while_running(
    tmp_path: Path, make_run: MakeRun, blank: Blank, harm: str
) -> None:
    runs = [make_run(seed, [12_288] * 3) for seed in range(3)]
    engine = open_engine(tmp_path / "s")
    for run in runs:
        finished(engine.submit_store(run))
    for file in region_files(tmp_path / "s"):
        if harm == "truncate":
            os.truncate(file, 0)
        else:
            file.unlink()
    if harm == "remove directory":
        shutil.rmtree(tmp_path / "s")
    for run in runs:
        loaded(engine, run, blank)
    after = make_run(50, [4096])
    reasons = finished(engine.submit_store(after))
    if harm == "remove directory":
        assert reasons == [Reason.REJECTED]
        assert engine.stats().health is Health.MISS_ONLY
    else:
        assert reasons == [Reason.OK]
        assert loaded(engine, after, blank) == [True]
    engine.close()
    if harm != "remove directory":
        reopened = open_engine(tmp_path / "s")
        assert loaded(reopened, after, blank) == [True], "acknowledged, then lost"
        reopened.close()


def test_namespaces_share_the_log_and_never_mix(
    tmp_path: Path, runs: list[Run], make_run: MakeRun, blank: Blank
) -> None:
    engine = open_engine(tmp_path / "s")
    finished(engine.submit_store(runs[0]))
    engine.close()
    engine = open_engine(tmp_path / "s", OTHER_NAMESPACE)
    assert engine.lookup(runs[0].keys) == (0, Stop.MISS)
    assert engine.stats().physical_bytes == REGION
    same_keys = Run(runs[0].keys, runs[1].pages)
    assert finished(engine.submit_store(same_keys)) == [Reason.OK] * 2
    engine.close()
    engine = open_engine(tmp_path / "s")
    assert loaded(engine, runs[0], blank) == [True, True]
    engine.close()


def test_later_region_wins_when_a_key_occurs_twice(
    tmp_path: Path, runs: list[Run], blank: Blank, page_data: PageData
) -> None:
    """Forget a page by corruption, store it anew: both copies are in the log."""
    engine = open_engine(tmp_path / "s")
    finished(engine.submit_store(runs[0]))
    engine.close()
    first = region_files(tmp_path / "s")[0]
    position = first.read_bytes().find(page_data(runs[0])[0])
    flip(first, position)
    engine = open_engine(tmp_path / "s")
    assert loaded(engine, runs[0], blank) == [False, True]
    assert finished(engine.submit_store(runs[0])) == [Reason.OK, Reason.DUPLICATE]
    engine.close()
    engine = open_engine(tmp_path / "s")
    assert loaded(engine, runs[0], blank) == [True, True]
    engine.check_integrity()
    engine.close()


def test_smaller_cap_removes_the_oldest_at_open(
    tmp_path: Path, make_run: MakeRun, blank: Blank
) -> None:
    runs = [make_run(seed, [12_288] * 3) for seed in range(5)]
    engine = open_engine(tmp_path / "s")
    for run in runs:
        finished(engine.submit_store(run))
    engine.close()
    engine = open_engine(tmp_path / "s", regions=2)
    found = [loaded(engine, run, blank) == [True] * 3 for run in runs]
    assert found == [False, False, False, True, True]
    assert len(region_files(tmp_path / "s")) == 2
    engine.check_integrity()
    engine.close()


def test_newer_format_is_refused_and_no_byte_changes(
    sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = sealed / region_format.region_name(0)
    flip(damaged, 100)  # would be removed if the newer one below were not seen first
    monkeypatch.setattr(region_format, "FORMAT_VERSION", 4)
    newer = pack_region_header(RegionHeader(REGION, 9, b"n" * 16, 1))
    monkeypatch.undo()
    (sealed / region_format.region_name(9)).write_bytes(newer + bytes(REGION - len(newer)))
    before = digest(sealed)
    with pytest.raises(StoreFormatError, match="written in format 4, newer than 3"):
        open_engine(sealed)
    after = digest(sealed)
    del before["LOCK"], after["LOCK"]
    assert after == before


def test_files_are_private(sealed: Path, make_run: MakeRun) -> None:
    old = os.umask(0)
    try:
        engine = open_engine(sealed.parent / "a" / "b")
        finished(engine.submit_store(make_run(1, [100])))
    finally:
        os.umask(old)
    assert (sealed.parent / "a" / "b").stat().st_mode & 0o777 == 0o700
    for file in (sealed.parent / "a" / "b").iterdir():
        assert file.stat().st_mode & 0o777 == 0o600, file.name
    engine.close()


def test_symlinked_region_is_not_followed(sealed: Path, runs: list[Run], blank: Blank) -> None:
    file = region_files(sealed)[0]
    elsewhere = sealed.parent / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    assert pages_after(sealed, runs, blank) == NONE
    assert elsewhere.read_bytes() == before


def test_foreign_names_in_the_shard_are_left_alone(
    sealed: Path, runs: list[Run], blank: Blank
) -> None:
    (sealed / "notes.txt").write_text("mine")
    (sealed / "region-7.kv").write_text("mine too")
    (sealed / "region-00000000000000ff.kv").mkdir()
    assert pages_after(sealed, runs, blank) == ALL
    assert (sealed / "notes.txt").read_text() == "mine"
    assert (sealed / "region-7.kv").read_text() == "mine too"


def test_two_engines_on_one_directory(sealed: Path, runs: list[Run], blank: Blank) -> None:
    engine = open_engine(sealed)
    with pytest.raises(StoreLockedError, match=f"in use by process {os.getpid()}; stop it"):
        open_engine(sealed)
    assert loaded(engine, runs[0], blank) == [True, True]
    engine.close()
    open_engine(sealed).close()


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="another --tier-dir"):
        open_engine(tmp_path / "file")


KILLED = """
import os, random, sys
from pathlib import Path
from sglang_tiered.storage.base import Run
from sglang_tiered.storage.region import RegionEngine

engine = RegionEngine(
    Path(sys.argv[1]), namespace=b"\\x11" * 32, capacity_bytes=1 << 26, region_bytes=1 << 18
)
for seed in range(10**6):
    source = random.Random(seed)
    keys = tuple(source.randbytes(32) for _ in range(4))
    pages = tuple((memoryview(source.randbytes(size)),) for size in (4096, 5000, 12288, 1))
    job = engine.submit_store(Run(keys, pages))
    job.wait()
    if all(job.ok):
        os.write(1, b"%d\\n" % seed)
"""


@pytest.mark.parametrize("num_acknowledged", [1, 17, 60])
def test_kill_in_the_middle_of_stores(tmp_path: Path, blank: Blank, num_acknowledged: int) -> None:
    import random

    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "s")],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert writer.stdout is not None
    seeds = [int(writer.stdout.readline()) for _ in range(num_acknowledged)]
    with pytest.raises(StoreLockedError, match=f"process {writer.pid}"):
        open_engine(tmp_path / "s")
    writer.send_signal(signal.SIGKILL)
    seeds += [int(line) for line in writer.stdout.read().splitlines()]
    writer.wait()
    writer.stdout.close()
    engine = open_engine(tmp_path / "s", regions=1 << 10)
    for seed in seeds:
        source = random.Random(seed)
        keys = tuple(source.randbytes(32) for _ in range(4))
        pages = tuple((memoryview(source.randbytes(size)),) for size in (4096, 5000, 12288, 1))
        assert loaded(engine, Run(keys, pages), blank) == [True] * 4, f"run {seed} was lost"
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("name", ["region-0000000000000009.kv", "CHECKPOINT"])
def test_a_fifo_named_like_a_region_never_hangs(
    sealed: Path, runs: list[Run], blank: Blank, name: str
) -> None:
    (sealed / name).unlink(missing_ok=True)
    os.mkfifo(sealed / name)
    writer = os.open(sealed / name, os.O_RDWR)
    try:
        engine = open_engine(sealed)
        assert [all(loaded(engine, run, blank)) for run in runs] == [True] * len(runs)
        engine.close()
    finally:
        os.close(writer)
