"""``verify`` finds every kind of damage, names the place, and takes nothing else for damage."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sglang_tiered.storage.base import Run
from sglang_tiered.storage.region import RegionEngine, sync_worker
from sglang_tiered.storage.region.files import CHECKPOINT_NAME
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    Contents,
    Trailer,
    pack_footer,
    pack_region_header,
    pack_trailer,
    region_name,
    unpack_footer,
    unpack_region_header,
)
from sglang_tiered.storage.region.walk import Problem
from sglang_tiered.tools.store import scan
from sglang_tiered.tools.store.scan import ReadOnlyDevice

if TYPE_CHECKING:
    from kit.runs import MakeRun

REGION = 64 * 1024
FIRST = region_name(0)

Cli = Callable[..., Any]
Flip = Callable[[Path, int], None]
Digest = Callable[[Path], dict[str, object]]
Open = Callable[..., RegionEngine]
Store = Callable[[RegionEngine, Run], None]


def verify(cli: Cli, path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    outcome = cli("verify", path, "--json", *flags)
    return outcome.code, json.loads(outcome.out)


def problems(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(p["file"], p["part"]) for shard in report["shards"] for p in shard["problems"]]


def test_an_intact_store_is_fine(cli: Cli, tier: Path) -> None:
    code, report = verify(cli, tier)
    assert (code, report["ok"], problems(report)) == (0, True, [])
    total = report["total"]
    assert (total["regions"], total["extents"], total["pages"]) == (3, 3, 9)
    assert total["payload_bytes"] == 3 * (12_288 + 12_000 + 9_000)
    assert report["bytes_read"] > total["payload_bytes"]
    outcome = cli("verify", tier)
    assert outcome.code == 0
    assert "fine: all 9 pages verify" in outcome.out
    assert "MB/s" in outcome.out


@pytest.mark.parametrize(
    ("offset", "part"),
    [
        (20, "header"),
        (BLOCK_BYTES - 1, "header"),
        (BLOCK_BYTES + 3, "extent"),
        (BLOCK_BYTES + 60, "extent"),
        (2 * BLOCK_BYTES - 1, "extent"),
        (2 * BLOCK_BYTES, "page"),
        (5 * BLOCK_BYTES + 11_999, "page"),
        (REGION - 2 * BLOCK_BYTES + 50, "footer"),
        (REGION - BLOCK_BYTES - 1, "footer"),
        (REGION - BLOCK_BYTES + 2, "trailer"),
        (REGION - 1, "trailer"),
    ],
)
def test_a_flipped_bit_is_found_where_it_is(
    cli: Cli, tier: Path, shard: Path, flip: Flip, offset: int, part: str
) -> None:
    flip(shard / FIRST, offset)
    code, report = verify(cli, tier)
    assert code == 1
    assert problems(report) == [(FIRST, part)]
    (problem,) = report["shards"][0]["problems"]
    assert problem["offset"] <= offset < problem["offset"] + problem["length"]
    outcome = cli("verify", tier)
    assert outcome.code == 1
    assert FIRST in outcome.out
    assert "damaged: 1 of 3 regions" in outcome.out


def test_a_damaged_page_is_named_and_placed(
    cli: Cli, tier: Path, shard: Path, flip: Flip, make_run: MakeRun
) -> None:
    flip(shard / region_name(1), 5 * BLOCK_BYTES + 100)
    _, report = verify(cli, tier)
    (problem,) = report["shards"][0]["problems"]
    assert problem["key"] == make_run(1, [12_288, 12_000, 9_000]).keys[1].hex()
    assert problem["namespace"] == "11" * 32
    place = [problem[name] for name in ("region", "extent", "offset", "length")]
    assert place == [1, 0, 5 * BLOCK_BYTES, 12_000]
    assert report["total"]["damaged_pages"] == 1
    assert report["total"]["pages"] == 9


def test_no_flipped_bit_in_use_goes_unseen(cli: Cli, tier: Path, shard: Path, flip: Flip) -> None:
    source = random.Random(5)
    pages = [(8192, 12_288), (20_480, 12_000), (32_768, 9_000)]
    used = [(0, 8192), *((start, start + size) for start, size in pages), (REGION - 8192, REGION)]
    for _ in range(40):
        start, stop = source.choice(used)
        offset = source.randrange(start, stop)
        flip(shard / FIRST, offset)
        code, _ = verify(cli, shard, "--region", "0")
        assert code == 1, f"a flipped bit at {offset} was not seen"
        flip(shard / FIRST, offset)
    assert verify(cli, shard)[0] == 0


def reseal(file: Path, change: Callable[[Contents], Contents]) -> None:
    """Replace the footer by another that verifies."""
    data = bytearray(file.read_bytes())
    header = unpack_region_header(data[:BLOCK_BYTES])
    assert header is not None
    contents = unpack_footer(data[-2 * BLOCK_BYTES : -BLOCK_BYTES], header.nonce)
    assert contents is not None
    contents = change(contents)
    footer = pack_footer(contents, header.nonce)
    offset = REGION - BLOCK_BYTES - len(footer)
    trailer = Trailer(header.nonce, len(contents.extents), offset, len(footer))
    data[offset:] = footer + pack_trailer(trailer)
    file.write_bytes(data)


def other_checksum(contents: Contents) -> Contents:
    contents.pages["checksum"][1] ^= 1
    return contents


def other_offset(contents: Contents) -> Contents:
    contents.extents["offset"][0] += BLOCK_BYTES
    return contents


def nothing(_: Contents) -> Contents:
    return Contents.of([])


def empty_extent(contents: Contents) -> Contents:
    contents.extents["num_pages"] = 0
    return Contents(contents.extents, contents.pages[:0])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (other_checksum, "disagrees with the header of extent 0"),
        (other_offset, "lists no extent at 4096"),
        (nothing, "does not list the extent at 4096"),
        (empty_extent, "does not verify"),
    ],
)
def test_a_footer_that_verifies_and_disagrees_is_damage(
    cli: Cli, tier: Path, shard: Path, change: Callable[[Contents], Contents], what: str
) -> None:
    reseal(shard / FIRST, change)
    code, report = verify(cli, tier)
    assert code == 1
    found = [p["problem"] for p in report["shards"][0]["problems"] if p["part"] == "footer"]
    assert len(found) == 1
    assert what in found[0]


def forge_footer_size(data: bytearray, nonce: bytes) -> None:
    data[-BLOCK_BYTES:] = pack_trailer(Trailer(nonce, 1, REGION - BLOCK_BYTES, 0))


def forge_whole_region_as_footer(data: bytearray, nonce: bytes) -> None:
    data[-BLOCK_BYTES:] = pack_trailer(Trailer(nonce, 1, 0, REGION - BLOCK_BYTES))


def forge_region_size(data: bytearray, _: bytes) -> None:
    header = unpack_region_header(data[:BLOCK_BYTES])
    assert header is not None
    data[:BLOCK_BYTES] = pack_region_header(header._replace(nbytes=(1 << 64) - BLOCK_BYTES))


def forge_extent_size(data: bytearray, _: bytes) -> None:
    data[BLOCK_BYTES + 12 : BLOCK_BYTES + 16] = (0xFFFFF000).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("forge", "what"),
    [
        (forge_footer_size, "trailer does not verify"),
        (forge_whole_region_as_footer, "trailer is impossible"),
        (forge_region_size, "header does not verify"),
        (forge_extent_size, "extent header is missing"),
    ],
)
def test_impossible_sizes_are_damage_and_no_allocation(
    cli: Cli, tier: Path, shard: Path, forge: Callable[[bytearray, bytes], None], what: str
) -> None:
    data = bytearray((shard / FIRST).read_bytes())
    header = unpack_region_header(data[:BLOCK_BYTES])
    assert header is not None
    forge(data, header.nonce)
    (shard / FIRST).write_bytes(data)
    code, report = verify(cli, tier)
    assert code == 1
    assert {file for file, _ in problems(report)} == {FIRST}
    found = report["shards"][0]["problems"]
    assert what in [f"{problem['part']} {problem['problem']}" for problem in found]


def plant_link(path: Path) -> None:
    path.symlink_to(path.parent / region_name(1))


def plant_garbage(path: Path) -> None:
    path.write_bytes(b"x" * REGION)


def plant_copy(path: Path) -> None:
    shutil.copy(path.parent / region_name(1), path)


def plant_cut(path: Path) -> None:
    shutil.copy(path.parent / region_name(2), path)
    os.truncate(path, 100)


@pytest.mark.parametrize(
    ("plant", "what"),
    [
        (plant_link, "a symbolic link"),
        (os.mkfifo, "a FIFO"),
        (os.mkdir, "a directory"),
        (Path.touch, "is empty"),
        (plant_cut, "has only 100 bytes"),
        (plant_garbage, "does not verify"),
        (plant_copy, f"belongs to {region_name(1)}"),
    ],
)
def test_a_file_named_like_a_region_is_reported(
    cli: Cli, tier: Path, shard: Path, plant: Callable[[Path], object], what: str
) -> None:
    name = region_name(16)
    plant(shard / name)
    code, report = verify(cli, tier)
    assert code == 1
    (problem,) = report["shards"][0]["problems"]
    assert (problem["file"], problem["region"]) == (name, 16)
    assert what in problem["problem"]
    assert report["total"]["pages"] == 9


def test_a_region_cut_short_names_lost_pages(cli: Cli, tier: Path, shard: Path) -> None:
    os.truncate(shard / region_name(2), 6 * BLOCK_BYTES)
    code, report = verify(cli, tier)
    assert code == 1
    found = report["shards"][0]["problems"]
    assert [p["part"] for p in found] == ["file", "page", "page"]
    assert "has 24576 bytes, should 65536" in found[0]["problem"]


def test_a_damaged_checkpoint_is_a_note(cli: Cli, tier: Path, shard: Path, flip: Flip) -> None:
    flip(shard / CHECKPOINT_NAME, 10)
    code, report = verify(cli, tier)
    assert code == 0
    assert any("checkpoint does not verify" in note for note in report["notes"])
    (shard / CHECKPOINT_NAME).unlink()
    code, report = verify(cli, tier)
    assert (code, report["notes"]) == (0, [])


@pytest.fixture
def crashed(
    tmp_path: Path,
    open_engine: Open,
    make_run: MakeRun,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Path, int]:
    """A shard as a crash leaves it, one region open with three extents; and how far it was synced:
    the first two."""
    monkeypatch.setattr(sync_worker, "_CHECKPOINT_INTERVAL_S", 0.0)
    engine = open_engine(tmp_path / "shard-live")
    for seed in range(2):
        store(engine, make_run(seed, [8192]))
    assert engine.flush(20.0)
    store(engine, make_run(2, [8192]))
    shutil.copytree(tmp_path / "shard-live", tmp_path / "shard-0")
    engine.close()
    return tmp_path / "shard-0", BLOCK_BYTES + 2 * (BLOCK_BYTES + 8192)


def test_an_open_regions_torn_end_is_a_note(
    cli: Cli, crashed: tuple[Path, int], flip: Flip
) -> None:
    shard, synced = crashed
    code, report = verify(cli, shard)
    assert (code, report["total"]["pages"], report["total"]["open_regions"]) == (0, 3, 1)
    for offset in (synced + 200, synced + BLOCK_BYTES + 5000):
        flip(shard / FIRST, offset)
        code, report = verify(cli, shard)
        assert (code, report["total"]["pages"]) == (0, 2)
        assert f"behind offset {synced}" in report["notes"][0]
        flip(shard / FIRST, offset)


@pytest.mark.parametrize(("offset", "part"), [(BLOCK_BYTES + 7, "extent"), (9000, "page")])
def test_damage_in_an_open_regions_synced_part_shows(
    cli: Cli, crashed: tuple[Path, int], flip: Flip, offset: int, part: str
) -> None:
    shard, _ = crashed
    flip(shard / FIRST, offset)
    code, report = verify(cli, shard)
    assert (code, problems(report)) == (1, [(FIRST, part)])


def test_a_running_servers_open_region_is_no_damage(
    cli: Cli, tier: Path, shard: Path, open_engine: Open, make_run: MakeRun, store: Store
) -> None:
    engine = open_engine(shard)
    store(engine, make_run(9, [8192]))
    code, report = verify(cli, tier)
    assert code == 0
    assert report["shards"][0]["lock"] == {"held": True, "pid": os.getpid()}
    assert report["total"]["open_regions"] == 1
    assert "is open: the server writes to it" in report["notes"][0]
    assert f"in use by process {os.getpid()}" in cli("verify", tier).out
    engine.check_integrity()


def test_a_store_reclaimed_all_the_time_is_fine(
    cli: Cli, tier: Path, shard: Path, open_engine: Open, make_run: MakeRun
) -> None:
    engine = open_engine(shard)  # holds 32 regions: every run beyond takes one away
    stop = threading.Event()

    def write() -> None:
        for seed in itertools.count(100):
            if stop.is_set():
                return
            assert engine.submit_store(make_run(seed, [9000] * 5)).wait(20.0)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = [verify(cli, tier) for _ in range(12)]
    finally:
        stop.set()
        writer.join(20.0)
    assert not writer.is_alive()
    assert [(code, problems(report)) for code, report in found] == [(0, [])] * 12
    engine.check_integrity()


def test_a_file_being_created_is_no_damage(
    cli: Cli, tier: Path, shard: Path, open_engine: Open
) -> None:
    engine = open_engine(shard)
    (shard / region_name(7)).write_bytes(bytes(REGION))
    assert verify(cli, tier)[0] == 0
    engine.close()
    code, report = verify(cli, tier)
    assert (code, problems(report)) == (1, [(region_name(7), "header")])


def test_pages_right_at_second_look_are_undamaged(
    cli: Cli, tier: Path, shard: Path, open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_engine(shard)
    inspect_region = scan.inspect_region
    looks: list[str] = []

    def look(device: ReadOnlyDevice, name: str, **options: Any) -> Any:
        view = inspect_region(device, name, **options)
        looks.append(name)
        if name == FIRST and looks.count(name) == 1:
            view.problems.append(Problem("footer", 0, 0, "is being written"))
        return view

    monkeypatch.setattr(scan, "inspect_region", look)
    assert verify(cli, tier)[0] == 0
    assert looks.count(FIRST) == 2


@pytest.mark.parametrize("when", ["before", "while"])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_region_reclaimed_meanwhile_is_no_damage(
    cli: Cli,
    tier: Path,
    shard: Path,
    flip: Flip,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    damaged: bool,
) -> None:
    if damaged:
        flip(shard / FIRST, 9000)
    method = "open" if when == "before" else "readv"
    original = getattr(ReadOnlyDevice, method)

    def reclaim(self: ReadOnlyDevice, *arguments: Any) -> Any:
        if when == "while" or arguments == (FIRST,):
            (shard / FIRST).unlink(missing_ok=True)
        return original(self, *arguments)

    monkeypatch.setattr(ReadOnlyDevice, method, reclaim)
    code, report = verify(cli, tier, "--jobs", "1")
    assert (code, report["total"]["regions_gone_meanwhile"]) == (0, 1)
    assert "1 regions were reclaimed" in report["notes"][-1]


def test_a_bad_sector_costs_only_its_pages(
    cli: Cli, tier: Path, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = 5 * BLOCK_BYTES  # where the second page begins
    original = ReadOnlyDevice.readv

    def readv(self: ReadOnlyDevice, fd: int, segments: Any, offset: int) -> int:
        length = sum(segment.nbytes for segment in segments)
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        if name == FIRST and offset <= bad < offset + length:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(self, fd, segments, offset)

    monkeypatch.setattr(ReadOnlyDevice, "readv", readv)
    code, report = verify(cli, tier)
    assert code == 1
    assert [(p["part"], p["offset"]) for p in report["shards"][0]["problems"]] == [("page", bad)]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_a_region_we_may_not_open_is_reported(
    cli: Cli, tier: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fail_opening(monkeypatch, code)
    outcome, report = verify(cli, tier)
    assert outcome == 1
    assert os.strerror(code) in report["shards"][0]["problems"][0]["problem"]


def test_too_many_open_files_is_one_sentence(
    cli: Cli, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_opening(monkeypatch, errno.EMFILE)
    outcome = cli("verify", tier)
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert os.strerror(errno.EMFILE) in outcome.err


def fail_opening(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    original = ReadOnlyDevice.open

    def fail(self: ReadOnlyDevice, name: str) -> int:
        if name == FIRST:
            raise OSError(code, os.strerror(code), name)
        return original(self, name)

    monkeypatch.setattr(ReadOnlyDevice, "open", fail)


def test_without_direct_io_all_is_found_as_well(
    cli: Cli, tier: Path, shard: Path, flip: Flip, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = []
    monkeypatch.setattr("sglang_tiered.tools.store.scan._DIRECT", 0)
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: dropped.append(arguments[3]))
    assert verify(cli, tier)[0] == 0
    assert set(dropped) == {os.POSIX_FADV_DONTNEED}
    flip(shard / FIRST, 9000)
    assert verify(cli, tier)[0] == 1


def test_one_region_by_number_or_name(cli: Cli, tier: Path, shard: Path, flip: Flip) -> None:
    flip(shard / region_name(1), 9000)
    for region, expected in (("0", 0), ("1", 1), ("0x1", 1), (region_name(1), 1)):
        code, report = verify(cli, tier, "--region", region)
        assert (code, report["total"]["regions"]) == (expected, 1)
    outcome = cli("verify", tier, "--region", "17")
    assert outcome.code == 2
    assert f"--region 17 ({region_name(17)}) is not in" in outcome.err


def test_the_bar_shows_on_stderr_when_told_to(cli: Cli, tier: Path) -> None:
    assert cli("verify", tier).err == ""
    outcome = cli("verify", tier, "--json", "--progress")
    assert "verifying" in outcome.err
    assert json.loads(outcome.out)["ok"]
    assert cli("verify", tier, "--no-progress").err == ""


@pytest.mark.parametrize("jobs", [1, 3])
def test_nothing_is_changed(cli: Cli, tier: Path, digest: Digest, jobs: int) -> None:
    before = digest(tier)
    assert cli("verify", tier, "--jobs", jobs).code == 0
    assert digest(tier) == before
