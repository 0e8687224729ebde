"""``verify`` finds every kind of damage, names the place, and takes nothing else for damage."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.commands import Cli
from kit.runs import make_run
from kit.stores import REGION, SIZES, flip, open_engine
from kit.tiers import store
from sglang_tiered.storage.base import Erasure, PinRefusal
from sglang_tiered.storage.region.device import FileReader
from sglang_tiered.storage.region.format import (
    BLOCK_BYTES,
    ERASED_NAME,
    PIN_PREFIX,
    Contents,
    RegionHeader,
    pack_footer,
    pack_region_header,
    pack_trailer,
    region_name,
    unpack_footer,
    unpack_region_header,
)
from sglang_tiered.tools.store.scan import ScannedRegion

FIRST = region_name(0)
Forge = Callable[[bytearray, RegionHeader], None]


def verify(cli: Cli, path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    outcome = cli("verify", path, "--json", *flags)
    return outcome.code, json.loads(outcome.out)


def problems(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(p["file"], p["part"]) for shard in report["shards"] for p in shard["problems"]]


@pytest.mark.parametrize("is_direct", [True, False])
def test_an_intact_store_is_fine(
    cli: Cli, tier: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    """It leaves nothing in memory that others need."""
    dropped: list[int] = []
    if not is_direct:
        monkeypatch.setattr("sglang_tiered.storage.region.device._DIRECT", 0)
        monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: dropped.append(arguments[3]))
    code, report = verify(cli, tier)
    assert (code, report["ok"], problems(report)) == (0, True, [])
    total = report["total"]
    assert (total["regions"], total["extents"], total["pages"]) == (3, 3, 9)
    assert total["payload_bytes"] == 3 * (12_288 + 12_000 + 9_000)
    assert "fine: all 9 pages verify" in cli("verify", tier).out
    assert is_direct or set(dropped) == {os.POSIX_FADV_DONTNEED}


@pytest.mark.parametrize(
    ("offset", "part"),
    [
        (20, "header"),
        (BLOCK_BYTES + 3, "extent"),
        (2 * BLOCK_BYTES, "page"),
        (5 * BLOCK_BYTES + 11_999, "page"),
        (REGION - 2 * BLOCK_BYTES + 50, "footer"),
        (REGION - BLOCK_BYTES - 1, "footer"),
        (REGION - 1, "trailer"),
    ],
)
def test_a_flipped_bit_is_found_where_it_is(
    cli: Cli, tier: Path, shard: Path, offset: int, part: str
) -> None:
    flip(shard / FIRST, offset)
    code, report = verify(cli, tier)
    assert code == 1
    assert problems(report) == [(FIRST, part)]
    (problem,) = report["shards"][0]["problems"]
    assert problem["offset"] <= offset < problem["offset"] + problem["length"]
    if part == "page":
        page = 0 if offset == 2 * BLOCK_BYTES else 1
        about = make_run(0, SIZES).keys[page].hex(), "11" * 32, 0, 0, SIZES[page]
        names = ("key", "namespace", "region", "extent", "length")
        assert tuple(problem[name] for name in names) == about
        assert (report["total"]["damaged_pages"], report["total"]["pages"]) == (1, 9)


def other_checksum(contents: Contents) -> Contents:
    contents.pages["checksum"][1] ^= 1
    return contents


def other_offset(contents: Contents) -> Contents:
    contents.extents["offset"][0] += BLOCK_BYTES
    return contents


def empty_extent(contents: Contents) -> Contents:
    contents.extents["num_pages"] = 0
    return Contents(contents.extents, contents.pages[:0])


def reseal(change: Callable[[Contents], Contents]) -> Forge:
    """Replace the footer by another that verifies."""

    def forge(data: bytearray, header: RegionHeader) -> None:
        contents = unpack_footer(data[-2 * BLOCK_BYTES : -BLOCK_BYTES], header.nonce)
        assert contents is not None
        contents = change(contents)
        footer = pack_footer(contents, header.nonce)
        offset = REGION - BLOCK_BYTES - len(footer)
        trailer = pack_trailer(header.nonce, len(contents.extents), offset, len(footer))
        data[offset:] = footer + trailer

    return forge


def footer_at(offset: int, size: int) -> Forge:
    def forge(data: bytearray, header: RegionHeader) -> None:
        data[-BLOCK_BYTES:] = pack_trailer(header.nonce, 1, offset, size)

    return forge


def huge_region(data: bytearray, header: RegionHeader) -> None:
    data[:BLOCK_BYTES] = pack_region_header(header._replace(nbytes=(1 << 64) - BLOCK_BYTES))


def huge_extent(data: bytearray, _: RegionHeader) -> None:
    data[BLOCK_BYTES + 12 : BLOCK_BYTES + 16] = (0xFFFFF000).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("forge", "what"),
    [
        (reseal(other_checksum), "footer disagrees with the header of extent 0"),
        (reseal(other_offset), "footer lists no extent at 4096"),
        (reseal(lambda _: Contents.of([])), "footer does not list the extent at 4096"),
        (reseal(empty_extent), "footer does not verify"),
        (footer_at(REGION - BLOCK_BYTES, 0), "trailer does not verify"),
        (footer_at(0, REGION - BLOCK_BYTES), "trailer is impossible"),
        (huge_region, "header does not verify"),
        (huge_extent, "extent header is missing"),
    ],
)
def test_what_was_forged_is_damage_and_no_allocation(
    cli: Cli, tier: Path, shard: Path, forge: Forge, what: str
) -> None:
    data = bytearray((shard / FIRST).read_bytes())
    header = unpack_region_header(data[:BLOCK_BYTES])
    assert header is not None
    forge(data, header)
    (shard / FIRST).write_bytes(data)
    code, report = verify(cli, tier)
    assert code == 1
    assert {file for file, _ in problems(report)} == {FIRST}
    found = [f"{one['part']} {one['problem']}" for one in report["shards"][0]["problems"]]
    assert len([one for one in found if what in one]) == 1
    assert sum(one.startswith("footer") for one in found) == what.startswith("footer")


@pytest.mark.parametrize(
    ("plant", "what"),
    [
        (lambda path: path.symlink_to(path.parent / region_name(1)), "a symbolic link"),
        (os.mkfifo, "a FIFO"),
        (lambda path: path.write_bytes(b"x" * REGION), "does not verify"),
        (
            lambda path: shutil.copy(path.parent / region_name(1), path),
            f"belongs to {region_name(1)}",
        ),
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


@pytest.mark.parametrize("file", [ERASED_NAME, PIN_PREFIX])
def test_what_a_start_would_drop_is_damage(cli: Cli, tier: Path, shard: Path, file: str) -> None:
    engine = open_engine(shard)
    pinned = engine.pin("a", make_run(1, SIZES).keys)
    assert not isinstance(pinned, PinRefusal) and pinned.result(20.0)
    assert engine.erase(Erasure.of(make_run(2, SIZES).keys)).result(20.0)
    engine.close()
    assert verify(cli, tier)[0] == 0
    (path,) = shard.glob(f"{file}*")
    flip(path, 12)
    code, report = verify(cli, tier)
    assert (code, problems(report)) == (1, [(path.name, "file")])
    assert "the next start removes" in report["shards"][0]["problems"][0]["problem"]
    engine = open_engine(shard)
    assert engine.stats().num_pages == (0 if file == ERASED_NAME else 6)
    assert file != PIN_PREFIX or not engine.pins(), "that is what a start does"


def test_an_open_regions_torn_end_is_a_note(cli: Cli, tmp_path: Path) -> None:
    """As a crash leaves it: of three extents the last may be torn."""
    engine = open_engine(tmp_path / "shard-live")
    for seed in range(2):
        store(engine, make_run(seed, [8192]))
    assert engine.flush(20.0)
    store(engine, make_run(2, [8192]))
    shard = shutil.copytree(tmp_path / "shard-live", tmp_path / "shard-0")
    engine.close()
    synced = BLOCK_BYTES + 2 * (BLOCK_BYTES + 8192)
    code, report = verify(cli, shard)
    assert (code, report["total"]["pages"], report["total"]["open_regions"]) == (0, 3, 1)
    for offset in (synced + 200, synced + BLOCK_BYTES + 5000):
        flip(shard / FIRST, offset)
        code, report = verify(cli, shard)
        assert (code, report["total"]["pages"]) == (0, 2)
        assert f"behind offset {synced}" in report["notes"][0]
        flip(shard / FIRST, offset)
    flip(shard / FIRST, 9000)
    code, report = verify(cli, shard)
    assert (code, problems(report)) == (1, [(FIRST, "page")]), "others follow it"


@pytest.mark.parametrize("method", ["open", "readv"])
def test_a_region_reclaimed_meanwhile_is_no_damage(
    cli: Cli, tier: Path, shard: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    flip(shard / FIRST, 9000)
    original = getattr(FileReader, method)

    def reclaim(self: FileReader, *arguments: Any) -> Any:
        if method == "readv" or arguments == (FIRST,):
            (shard / FIRST).unlink(missing_ok=True)
        return original(self, *arguments)

    monkeypatch.setattr(FileReader, method, reclaim)
    code, report = verify(cli, tier, "--jobs", "1")
    assert (code, report["total"]["regions_gone_meanwhile"]) == (0, 1)


@pytest.mark.parametrize(
    ("method", "code"), [("open", errno.EACCES), ("open", errno.EMFILE), ("readv", errno.EIO)]
)
def test_a_region_that_cannot_be_read_is_reported(
    cli: Cli, tier: Path, monkeypatch: pytest.MonkeyPatch, method: str, code: int
) -> None:
    original = getattr(FileReader, method)

    def fail(self: FileReader, what: Any, *arguments: Any) -> Any:
        name = what if method == "open" else Path(os.readlink(f"/proc/self/fd/{what}")).name
        if name == FIRST:
            raise OSError(code, os.strerror(code), name)
        return original(self, what, *arguments)

    monkeypatch.setattr(FileReader, method, fail)
    if code == errno.EMFILE:  # too many open files are no damage
        assert os.strerror(code) in cli("verify", tier).refusal
    else:
        outcome, report = verify(cli, tier)
        assert outcome == 1
        said = os.strerror(code) if method == "open" else "cannot be read"
        assert said in report["shards"][0]["problems"][0]["problem"]


def test_a_running_servers_open_region_is_no_damage(cli: Cli, tier: Path, shard: Path) -> None:
    engine = open_engine(shard)
    store(engine, make_run(9, [8192]))
    code, report = verify(cli, tier)
    assert code == 0
    assert report["shards"][0]["lock"] == {"held": True, "pid": os.getpid()}
    assert report["total"]["open_regions"] == 1
    assert "is open: the server writes to it" in report["notes"][0]
    engine.check_integrity()
    (shard / region_name(7)).write_bytes(bytes(REGION))
    assert verify(cli, tier)[0] == 0, "it is being created"
    engine.close()
    code, report = verify(cli, tier)
    assert (code, problems(report)) == (1, [(region_name(7), "header")])


def test_region_sealed_while_it_is_read_is_fine(
    cli: Cli, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong counts if it is wrong a moment later."""
    real, seen = ScannedRegion.scan, set[int]()

    def scan(self: ScannedRegion, *arguments: Any, **how: Any) -> None:
        real(self, *arguments, **how)
        if self.sequence not in seen:
            self.report("footer", 0, 0, "does not verify")
        seen.add(self.sequence)

    monkeypatch.setattr(ScannedRegion, "scan", scan)
    assert verify(cli, tier)[0] == 0
